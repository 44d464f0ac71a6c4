"""Objectives: pure tensor functions, one file per algorithm, `LossInputs -> LossOutput`."""
