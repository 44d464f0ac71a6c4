"""Built-in environments: they make problems and grade responses."""
