"""Costs of this machine from short real runs, and predictions held against real runs."""
