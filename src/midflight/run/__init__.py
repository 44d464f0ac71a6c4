"""A run's life: its directory, the supervisor, the bodies of its processes, resuming and summing up."""
