"""Benchmarks, each repeatable by one command: `midflight compare` and `midflight bench NAME`.

Each says what machine it ran on.
"""
