"""How new weights travel from the trainer to the engines."""
