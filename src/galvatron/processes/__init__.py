"""What a rank's process needs: the other ranks, its environment, virtual GPUs, heartbeats, signals, failures."""
