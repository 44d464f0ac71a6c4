"""Comparison of schedules or losses over several runs: `midflight compare`."""
