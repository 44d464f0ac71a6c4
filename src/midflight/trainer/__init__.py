"""Stage 3: batches become gradients, optimizer steps, new weights and checkpoints."""
