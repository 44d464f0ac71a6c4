"""Schedules decide WHEN rollouts start, batches form and weights change.

They are pure objects, shared by the real system and the simulator.
"""
