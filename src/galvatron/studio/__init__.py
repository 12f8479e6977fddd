"""``galvatron studio``: the planner as a local page to ask. Knows planning; needs starlette and uvicorn to serve."""
