"""Midflight: reinforcement learning for language models, with weights updated while rollouts are in flight."""

__version__ = "0.1.0"
