"""Stage 2: turn groups of graded rollouts into packed batches that are ready for the trainer."""
