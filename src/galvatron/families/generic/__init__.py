"""Models of no known family: the stock model's own forward, run in parts, and what the planner is told of it."""
