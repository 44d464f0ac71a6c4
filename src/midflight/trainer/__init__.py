"""Stage 3: turn batches into gradients, optimizer steps, new weights and checkpoints."""
