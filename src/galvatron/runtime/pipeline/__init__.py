"""Micro-batches through the stages."""
