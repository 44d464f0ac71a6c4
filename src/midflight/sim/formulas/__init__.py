"""What rates and lags are in the steady state, in closed form."""
