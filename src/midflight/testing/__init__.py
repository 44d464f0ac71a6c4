"""Tiny models and fakes, shipped for users' own tests."""
