"""The exact search: stages (layers), cuts (stages of a pipeline), outer (batch × pipeline × micro-batches)."""

from galvatron.planner.search.candidates import Candidates
from galvatron.planner.search.combination import Candidate, Combination, Solved
from galvatron.planner.search.cuts import CutRule
from galvatron.planner.search.feasibility import Feasibility, least_budget
from galvatron.planner.search.outer import Optimum, Proof, search
from galvatron.planner.search.problem import Problem, most_micro_batches
from galvatron.planner.search.stage import StageProblem, StageSolution, solve_stage
from galvatron.planner.search.watch import Tell, Watch

__all__ = [
    "Candidate",
    "Candidates",
    "Combination",
    "CutRule",
    "Feasibility",
    "Optimum",
    "Problem",
    "Proof",
    "Solved",
    "StageProblem",
    "StageSolution",
    "Tell",
    "Watch",
    "least_budget",
    "most_micro_batches",
    "search",
    "solve_stage",
]
