"""WHEN rollouts start, batches form and weights change. Pure objects, shared by the real system and the simulator."""
