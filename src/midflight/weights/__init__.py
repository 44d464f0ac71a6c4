"""Transports that carry new weights from the trainer to the engines."""
