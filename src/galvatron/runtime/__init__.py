"""Runs a plan on PyTorch: groups, layouts, tensor and data parallelism, the pipeline."""
