"""Training: one command from a model's name to a trained model (docs/training.md)."""
