"""One rank's exact share of a plan of any size, run on one device: its true peak memory and compute time.

May know the runtime and everything below it. Imports torch, except for ``report``.
"""
