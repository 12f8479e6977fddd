"""What a layer, a layout change, a stage and an iteration cost: one file a formula family."""

from galvatron.planner.cost.communication import Floats
from galvatron.planner.cost.conventions import (
    CONVENTIONS,
    DISTRIBUTED_OPTIMIZER,
    GALVATRON,
    PAPER_SYSTEMS,
    Conventions,
)
from galvatron.planner.cost.experts import ExpertCosts, ExpertPairs
from galvatron.planner.cost.model import CostModel, StageCosts
from galvatron.planner.cost.pipeline import Pace, iteration_ns
from galvatron.planner.cost.tables import NEVER, Integers, LayerCosts, Tables, held_bytes
from galvatron.planner.cost.tied import Resplit

__all__ = [
    "CONVENTIONS",
    "DISTRIBUTED_OPTIMIZER",
    "GALVATRON",
    "NEVER",
    "PAPER_SYSTEMS",
    "Conventions",
    "CostModel",
    "ExpertCosts",
    "ExpertPairs",
    "Floats",
    "Integers",
    "LayerCosts",
    "Pace",
    "Resplit",
    "StageCosts",
    "Tables",
    "held_bytes",
    "iteration_ns",
]
