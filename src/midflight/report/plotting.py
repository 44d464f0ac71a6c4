"""How all plots look. matplotlib is an extra, imported when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from midflight.errors import MissingExtraError, RunDirectoryError

# Okabe and Ito's palette: distinguishable with any color vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def load_pyplot() -> Any:
    """matplotlib's, drawing into files only. Raises: MissingExtraError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    return pyplot


def save_figure(figure: Any, out: Path) -> None:
    """Write and forget it. Raises: RunDirectoryError if it cannot be written."""
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:  # of a suffix that is no format of pictures
        raise RunDirectoryError(f"cannot draw to {out}: {error}") from error
    finally:
        load_pyplot().close(figure)


def style_axis(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
