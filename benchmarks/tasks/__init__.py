"""Benchmarks of tasks: datasets, rewards, the sandbox and evaluation, one module each."""
