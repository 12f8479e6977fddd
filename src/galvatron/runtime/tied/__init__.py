"""Weights that several layers use: inside a stage, and across stages."""
