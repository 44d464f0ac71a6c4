"""What people look at: the live view, tables and plots."""
