"""Measure the costs of this machine in short real runs, and compare predictions with real runs."""
