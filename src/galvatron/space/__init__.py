"""The space of strategies: decision trees, the takeaways that prune them, and the named spaces searched."""

from galvatron.space.rules import RULES, Rule
from galvatron.space.spaces import EXTENDED, PAPER, SPACES, Space, Switches, space_named
from galvatron.space.tree import divisors, pipeline_degrees, tree

__all__ = [
    "EXTENDED",
    "PAPER",
    "RULES",
    "SPACES",
    "Rule",
    "Space",
    "Switches",
    "divisors",
    "pipeline_degrees",
    "space_named",
    "tree",
]
