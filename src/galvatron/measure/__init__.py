"""Measures what the planner's figures come from: links and devices of a cluster, layers of a model.

``clusters`` and ``layers`` are the entries. Measuring happens in processes of their own, so that the caller never
initialises a GPU; nothing the caller imports needs torch. May know the rehearsal and everything below it.
"""
