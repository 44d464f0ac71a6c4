"""What is measured, as pure functions (policy, lag), and where it is written (jsonl)."""
