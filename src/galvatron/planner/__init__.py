"""From a model, a cluster and a budget to the provably best plan. No torch."""
