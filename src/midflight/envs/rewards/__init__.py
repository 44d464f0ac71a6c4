"""Rewards: calling conventions, weighted sums, and the built-in functions. `launch/rewards.py` names them all."""
