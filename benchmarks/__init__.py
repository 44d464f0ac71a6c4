"""Measurements of the package that are not part of it: `python -m benchmarks NAME`."""
