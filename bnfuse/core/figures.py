"""Pictures by matplotlib, which is imported when one is made."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import write_atomically

FORMATS = (".png", ".svg", ".pdf")


def require_plotting(path: str | Path) -> None:
    """Check before any work that a picture can be made, and of this kind."""
    if Path(path).suffix.lower() not in FORMATS:
        raise BnfuseError(f"{path}: a plot ends in {', '.join(FORMATS)}")
    pyplot_figure()


def pyplot_figure() -> Any:
    """Import matplotlib's Figure. Raises BnfuseError where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BnfuseError("a plot needs matplotlib: pip install 'bnfuse[plot]'") from None
    return Figure


def save_figure(figure: Any, path: str | Path) -> None:
    """Write the whole picture, or leave what was there before. The same figure gives the same bytes: no date, no random
    names."""
    import matplotlib
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if "$" in text.get_text():  # a name, no formula
            text.set_parse_math(False)
    picture, kind = io.BytesIO(), Path(path).suffix.lower().removeprefix(".")
    dates: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "bnfuse"}):
        figure.savefig(picture, dpi=160, format=kind, metadata=dates.get(kind))
    write_atomically(Path(path), picture.getvalue())


def finish(axis: Any) -> None:
    """Give a bar chart its grid, without the frame, and leave room for the numbers at its bars."""
    axis.set_xlim(0, 1.12 * axis.get_xlim()[1])
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#e2e2e2", linewidth=0.8)
    axis.set_axisbelow(True)
