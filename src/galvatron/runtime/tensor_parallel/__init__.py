"""Layers split by tensor parallelism: rules applied, regions, the split vocabulary."""
