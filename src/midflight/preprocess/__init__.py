"""Stage 2: groups of graded rollouts become packed batches the trainer can take as they are."""
