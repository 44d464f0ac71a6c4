"""The check of a recipe in a process that ends, and gives the memory of torch and transformers back."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from midflight.config import Recipe
from midflight.errors import MidflightError, WorkerError
from midflight.run.supervisor import warm_up


def check_apart(recipe: Recipe) -> None:
    """Check the recipe as `launch.build.check_recipe` does, without importing torch into this process.

    The fork server of the run imports torch, and checks in a fork of its own. A process that has torch already checks
    the recipe itself.
    Raises: an error with the text and the exit code of the check's.
    """
    if "torch" in sys.modules:
        _check(recipe)
        return
    warm_up()
    start = multiprocessing.get_context("forkserver")
    ours, theirs = start.Pipe(duplex=False)
    process = start.Process(target=_check_and_tell, args=(recipe, theirs))
    process.start()
    theirs.close()
    try:
        exit_code, text = ours.recv()
    except EOFError:
        process.join()
        raise WorkerError(f"the check of the recipe ended with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if exit_code:
        error = WorkerError(text)
        error.exit_code = exit_code
        raise error


def _check(recipe: Recipe) -> None:
    from midflight.launch.build import check_recipe

    check_recipe(recipe)


def _check_and_tell(recipe: Recipe, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which kills this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    outcome = 0, ""
    try:
        _check(recipe)
    except MidflightError as error:
        outcome = error.exit_code, str(error)
    except Exception as error:
        traceback.print_exc()
        outcome = 1, f"the check of the recipe failed: {type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        connection.send(outcome)


def _end_with_parent() -> None:
    """End this process after its parent, even if the user's code hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
