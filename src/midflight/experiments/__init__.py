"""Runs that are made to be compared: `midflight compare`."""
