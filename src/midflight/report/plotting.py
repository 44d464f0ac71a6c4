"""Common style of all plots. matplotlib is an extra, imported only to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from midflight.errors import MissingExtraError, RunDirectoryError

# Okabe and Ito's palette: distinguishable with any color vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def load_pyplot() -> Any:
    """Import matplotlib's pyplot for drawing to files. Raises: MissingExtraError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    return pyplot


def save_figure(figure: Any, out: Path) -> None:
    """Write a figure to `out` and close it. Raises: RunDirectoryError if the file cannot be written."""
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: the suffix is not an image format
        raise RunDirectoryError(f"cannot draw to {out}: {error}") from error
    finally:
        load_pyplot().close(figure)


def style_axis(axis: Any) -> None:
    """Draw a faint grid and no frame at the top and right."""
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
