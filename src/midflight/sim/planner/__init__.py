"""Search for the best split of a cluster, based on the formulas."""
