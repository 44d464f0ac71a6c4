"""Benchmarks of whole runs, repeatable by one command: `midflight bench NAME`. Each prints what machine it ran on."""
