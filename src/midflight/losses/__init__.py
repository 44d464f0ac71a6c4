"""Policy losses: pure tensor functions `LossInputs -> LossOutput`, one file per algorithm."""
