"""Pictures of a run: tokens per target call, speed over plain decoding, accepted lengths.

Knows: matplotlib, where it is installed (extra `bench`). Does not know: how a figure is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftproof.bench import measures
from draftproof.bench.estimate import Estimate
from draftproof.bench.summary import PLAIN, Setting, Summary
from draftproof.errors import UserError
from draftproof.files import whole_file

_LINES = ("o-", "s--")  # ten colours, then the same with another line
Draw = Callable[[Any, Sequence[Summary]], None]


def write_plots(found: dict[Setting, list[Summary]], out: Path) -> list[str]:
    """Write the pictures into a run's folder, a panel for each setting; returns their names.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'draftproof[bench]'") from None
    for name, draw in PLOTS.items():
        heights = [1.2 + 0.25 * len(own) for own in found.values()]
        figure = Figure(figsize=(8, sum(heights)), layout="constrained")
        panels = figure.subplots(len(found), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (setting, own) in zip(panels, found.items(), strict=True):
            draw(axes, own)
            axes.set_title(setting.title, fontsize="medium")
            axes.grid(alpha=0.3)
        with whole_file(out / name) as work:
            # Without the version in it, the same figures are the same bytes.
            figure.savefig(work, dpi=80, format="png", metadata={"Software": None})
    return list(PLOTS)


def _bars(axes: Any, own: Sequence[Summary], of: Callable[[Summary], Estimate | None], label: str) -> None:
    """A bar a method with its interval, the first on top, and a line at 1."""
    shown = [(one.method, found) for one in own if (found := of(one)) is not None and found.count]
    names = [name for name, _ in shown]
    values = [found.value for _, found in shown]
    errors = [
        [_span(found.value, found.low) for _, found in shown],
        [_span(found.high, found.value) for _, found in shown],
    ]
    axes.barh(names, values, xerr=errors, color="#4c72b0", ecolor="#333333", capsize=2, height=0.6)
    axes.axvline(1, color="#999999", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.tick_params(axis="y", labelsize="small")


def _span(high: float, low: float) -> float:
    """A side of an interval; none where there is no interval."""
    return max(high - low, 0.0) if high == high and low == low else 0.0  # noqa: PLR0124 - nan is not itself


def _efficiency(axes: Any, own: Sequence[Summary]) -> None:
    _bars(axes, own, lambda one: measures.block_efficiency(one.records), "tokens per target call")


def _speed(axes: Any, own: Sequence[Summary]) -> None:
    _bars(axes, own, lambda one: one.speed.get(PLAIN), "tokens a second over our plain decoding")


def _lengths(axes: Any, own: Sequence[Summary]) -> None:
    """A line a method: the share of rounds by accepted tokens."""
    for place, one in enumerate(own):
        counts = measures.histogram(one.records)
        while counts and not counts[-1]:  # places that were drafted, and never reached
            counts.pop()
        if len(counts) > 1:
            shares = [count / sum(counts) for count in counts]
            axes.plot(shares, _LINES[place // 10 % 2], markersize=3, linewidth=1, label=one.method)
    axes.set_xlabel("accepted tokens of a round")
    axes.set_ylabel("share of drafted rounds")
    if axes.has_data():
        axes.legend(fontsize="x-small", ncols=2)


PLOTS: dict[str, Draw] = {"efficiency.png": _efficiency, "speed.png": _speed, "accepted.png": _lengths}
