"""Parameters of a layer on a rank: whole (DP) or sharded (SDP, ZeRO-2), and when their gradients are summed."""
