"""Waiting without polling: wake-ups between processes, and blocking calls in threads."""
