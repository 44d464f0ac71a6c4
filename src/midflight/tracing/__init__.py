"""Spans that every process writes, and the timeline made of them."""
