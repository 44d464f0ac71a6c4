"""The embedded generation engine. Token ids in, token ids out; it knows nothing of text, HTTP or RL.

engine.py      step(): admit -> prefill -> decode -> sample -> record, one token for every running sequence
rows.py        plain-Python and NumPy bookkeeping of what is running in which row
decoder.py     the forward pass over fused weights, and the two weight buffers an update swaps
randomness.py  the random numbers of a rollout: a function of (seed, rollout id, position)
"""
