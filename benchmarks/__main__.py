"""`python -m benchmarks NAME [options]`: each benchmark is one module of this folder with an `app`."""

from __future__ import annotations

import typer

from benchmarks.digest import digest

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure this machine. Leave it alone meanwhile.")


@app.callback()
def benchmarks() -> None:
    """Keep the name of the benchmark an argument even while there is only one."""


app.command("digest")(digest)

if __name__ == "__main__":
    app()
