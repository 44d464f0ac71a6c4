"""Stage 1: problems become groups of graded rollouts. The only place that sees what is in flight."""
