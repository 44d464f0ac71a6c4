"""Output for people: the live view, tables and plots."""
