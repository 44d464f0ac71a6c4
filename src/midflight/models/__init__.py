"""Models: loading Hugging Face models and tokenizers from a directory, and the trainer's packed forward pass."""
