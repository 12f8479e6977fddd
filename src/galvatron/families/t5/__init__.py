"""T5: its facts for the planner, its adapter for the runtime."""
