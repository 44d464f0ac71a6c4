"""The best split of a cluster: a search over the formulas."""
