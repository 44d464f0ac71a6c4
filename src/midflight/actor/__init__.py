"""Stage 1: problems become groups of graded rollouts. No other stage sees the rollouts in flight."""
