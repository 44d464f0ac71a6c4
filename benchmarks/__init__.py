"""Measurements of the package, not shipped with it: `python -m benchmarks NAME`."""
