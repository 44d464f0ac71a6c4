"""Metrics: pure functions (policy, lag, lengths) and the places they are written to (jsonl, sinks)."""
