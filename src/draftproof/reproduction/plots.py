"""Pictures of the recipes that stand for a figure, where matplotlib is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftproof.files import whole_file


def draw(outcome: dict[str, Any], out: Path, tell: Callable[[str], None]) -> str | None:
    """Draw a recipe's figure into the folder; the file's name, or None without matplotlib, which is said.

    Args:
        outcome: with `name` and `figure`.
        out: the folder.
        tell: told if nothing can be drawn.
    """
    name = f"{outcome['name']}.png"
    if (out / name).exists():
        return name
    try:
        from matplotlib.figure import Figure
    except ImportError:
        tell(f"{outcome['name']}: no picture, its data are in the report (pip install 'draftproof[bench]' draws it)")
        return None
    told = outcome["figure"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for place, line in enumerate(told["series"]):
        if told["bars"]:
            width = 0.8 / len(told["series"])
            axes.bar([x + place * width for x in line["x"]], line["y"], width, label=line["label"])
        elif line["error"]:
            axes.errorbar(line["x"], line["y"], line["error"], label=line["label"], marker="o", capsize=3)
        else:
            axes.plot(line["x"], line["y"], "o-" if line["line"] else "o", markersize=4, label=line["label"])
    axes.set_xlabel(told["x"])
    axes.set_ylabel(told["y"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with whole_file(out / name) as work:
        figure.savefig(work, dpi=110, format="png", metadata={"Software": None})
    return name
