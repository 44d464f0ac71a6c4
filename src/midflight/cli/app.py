"""Reinforcement learning for language models, with weights updated in flight.

Results go to stdout, everything else to stderr.

Exit codes: 0 success, 1 failed run, 2 wrong input, 130 interrupted run, which can be resumed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from midflight.cli.evaluation import evaluate
from midflight.cli.recipes import config_app
from midflight.cli.results import compare, report
from midflight.cli.runs import demo, serve, train
from midflight.cli.sim import calibrate, plan, simulate
from midflight.cli.start import doctor, new
from midflight.errors import MidflightError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.command()(demo)
app.command()(new)
app.command()(train)
app.command(name="eval")(evaluate)
app.command()(serve)
app.command()(report)
app.command()(compare)
app.command()(plan)
app.command()(simulate)
app.command()(calibrate)
app.command()(doctor)
app.add_typer(config_app, name="config")


def main() -> None:
    """Run the command line; every midflight error is printed as one line."""
    # For the user's own losses and environments. At the end of the path, so that no file there replaces a package.
    sys.path.append(str(Path.cwd()))
    try:
        app(standalone_mode=True)
    except MidflightError as error:
        print(f"midflight: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
