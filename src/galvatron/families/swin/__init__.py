"""Swin: its facts for the planner, its adapter for the runtime."""
