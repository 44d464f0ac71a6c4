"""Rates and lags in the steady state, as closed formulas."""
