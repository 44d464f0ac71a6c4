"""The `midflight` command: one file per family of subcommands."""

from midflight.cli.app import app, main

__all__ = ["app", "main"]
