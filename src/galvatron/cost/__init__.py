"""What a layer, a layout change, a stage and an iteration cost: one file a formula family."""

from galvatron.cost.conventions import CONVENTIONS, GALVATRON, PAPER_SYSTEMS, Conventions
from galvatron.cost.memory import STATE_BYTES
from galvatron.cost.model import NEVER, CostModel, Integers, LayerCosts, StageCosts, Tables
from galvatron.cost.pipeline import Pace, Schedule, in_flight, iteration_ns
from galvatron.cost.resplit import Resplit

__all__ = [
    "CONVENTIONS",
    "GALVATRON",
    "NEVER",
    "PAPER_SYSTEMS",
    "STATE_BYTES",
    "Conventions",
    "CostModel",
    "Integers",
    "LayerCosts",
    "Pace",
    "Resplit",
    "Schedule",
    "StageCosts",
    "Tables",
    "in_flight",
    "iteration_ns",
]
