"""Midflight: reinforcement learning for language models that keep generating while they learn."""

__version__ = "0.1.0"
