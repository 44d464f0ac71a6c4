"""Loading Hugging Face models and tokenizers from a directory, and the attention the trainer runs them with."""
