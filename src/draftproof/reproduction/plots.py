"""Pictures for the recipes of a paper's figures, drawn if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftproof.errors import UserError
from draftproof.results import new_figure, save_figure


def draw(outcome: dict[str, Any], out: Path, notify: Callable[[str], None]) -> str | None:
    """Draw a recipe's figure into the folder, unless it is there; the file's name, or None without matplotlib."""
    name = f"{outcome['name']}.png"
    if (out / name).exists():
        return name
    try:
        figure = new_figure(7.0, 4.5)
    except UserError as missing:
        notify(f"{outcome['name']}: no picture, its data are in the report; {missing}")
        return None
    shown = outcome["figure"]
    axes = figure.add_subplot()
    for place, line in enumerate(shown["series"]):
        if shown["bars"]:
            width = 0.8 / len(shown["series"])
            axes.bar([x + place * width for x in line["x"]], line["y"], width, label=line["label"])
        elif line["error"]:
            axes.errorbar(line["x"], line["y"], line["error"], label=line["label"], marker="o", capsize=3)
        else:
            axes.plot(line["x"], line["y"], "o-", markersize=4, label=line["label"])
    axes.set_xlabel(shown["x"])
    axes.set_ylabel(shown["y"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, out / name, dpi=110)
    return name
