"""The report of a run: Markdown with pictures, and the same figures as JSON.

Tables of counts and of times are separate: a second run with the same seeds gives the same tables of counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from draftproof.bench import measures
from draftproof.bench.cell import OURS
from draftproof.bench.estimate import FEWEST, LEVEL, RESAMPLES, Estimate
from draftproof.bench.record import Record
from draftproof.bench.summary import BASES, PLAIN, Setting, Summary, summarize
from draftproof.errors import UserError
from draftproof.files import write_json, write_text
from draftproof.provenance import KEY, header
from draftproof.results import finite, new_figure, save_figure, table

REPORT, FIGURES = "report.md", "figures.json"
COUNT_HEADS = (
    "method",
    "tokens per target call",
    "over token",
    "accepted a round",
    "accepted of drafted",
    "discarded per token",
    "target calls per token",
    "GFLOP per token",
    "same tokens as plain",
)
POSITIONS = 8
_LINES = ("o-", "s--")  # ten colours with each line style
Draw = Callable[[Any, Sequence[Summary]], None]


def write_report(out: Path, *, plots: bool = True) -> list[Summary]:
    """Write report.md, figures.json and, where matplotlib is installed, the plots of a run's folder."""
    found, metadata = summarize(out)
    if not found:
        raise UserError(f"{out} holds no record yet: repeat the command of its run")
    drawn = write_plots(by_setting(found), out) if plots else []
    write_text(out / REPORT, markdown(found, metadata, drawn))
    write_json(out / FIGURES, finite({KEY: metadata[KEY], "methods": [one.to_dict() for one in found]}))
    return found


def markdown(found: Sequence[Summary], metadata: dict[str, Any], plots: Sequence[str] = ()) -> str:
    """The report of summaries; `plots` are names of pictures in the same folder."""
    lines = ["# Benchmark", "", *header(metadata[KEY]), "", *_setup(metadata), ""]
    for setting, own in by_setting(found).items():
        lines += [f"## {setting.title}", "", *count_table(own), "", *speed_table(own), "", *split_table(own), ""]
        lines += [*accepted_table(own), "", *quality_table(own)]
    lines += [*_regression(found), "", *_notes(found, metadata)]
    lines += [line for name in plots for line in ("", f"![{name.partition('.')[0]}]({name})")]
    return "\n".join(lines) + "\n"


def by_setting(found: Iterable[Summary]) -> dict[Setting, list[Summary]]:
    """Summaries of each setting, in order."""
    made: dict[Setting, list[Summary]] = {}
    for one in found:
        made.setdefault(one.setting, []).append(one)
    return made


def _setup(metadata: dict[str, Any]) -> list[str]:
    """What was run and how, below the header."""
    cells = metadata["cells"]
    dtypes = ", ".join(dict.fromkeys(cell["dtype"] for cell in cells))
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(cell["seed"] for cell in cells))
    lengths = ", ".join(str(count) for count in dict.fromkeys(cell["max_tokens"] for cell in cells))
    sets = ", ".join(f"{name} ({data['questions']})" for name, data in metadata["data"].items())
    load = metadata.get("load_at_end")
    return [
        f"Models: {', '.join(metadata['models'])}; dtype {dtypes}; batch 1, up to {lengths} tokens; seeds {seeds}.",
        f"Questions: {sets}. Each answer was measured {_times(metadata['repeats'])}; each method first gave "
        f"{metadata['warmup']} answers that do not count." + ("" if load is None else f" Load at the end: {load:.1f}."),
        "",
        f"Order: {metadata['order']}.",
        f"Intervals: {LEVEL:.0%}, expanded percentile bootstrap over questions ({RESAMPLES} resamples); none under",
        f"{FEWEST} questions. With many intervals, some do not contain the true value.",
        "A speed is the median over questions of the ratio to the baseline's answer to the same question in the same",
        "turn; `decoding` leaves out the first round of each answer, which also reads the prompt. `over token`: the",
        "ratio of tokens per target call to rule token on one chain with the same stopper.",
        "`?` marks an interval that contains 1.",
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def figure(found: Estimate, digits: int = 2) -> str:
    """A value with its interval."""
    if math.isnan(found.value):
        return "-"
    if math.isnan(found.low):
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def count_table(own: Sequence[Summary]) -> list[str]:
    """A table of tokens generated and accepted."""
    return table(COUNT_HEADS, [_count_row(one) for one in own])


def _count_row(one: Summary) -> list[str]:
    stats = measures.total(measures.first(one.records))
    return [
        _marked(one),
        figure(measures.block_efficiency(one.records)),
        "-" if one.gain is None else f"{figure(one.gain, 3)}{'' if one.gain.sure else ' ?'}",
        figure(measures.mean_accepted(one.records)),
        f"{stats.num_accepted_tokens / stats.num_draft_tokens:.0%}" if stats.num_draft_tokens else "-",
        figure(measures.discard_rate(one.records)),
        figure(measures.verification_rate(one.records)),
        "-" if one.flops is None else f"{one.flops / 1e9:.3g}",
        "-" if one.agrees is None else f"{one.agrees[0]} of {one.agrees[1]}",
    ]


def speed_table(own: Sequence[Summary]) -> list[str]:
    """A table of speeds, and of their ratios to every baseline, whole and without reading the prompt."""
    bases = [name for name in BASES if any(name in one.speed for one in own)]
    heads = ("method", "tokens a second", *(f"over {name}" for name in bases), *(f"decoding over {n}" for n in bases))
    rows = []
    for one in own:
        rate = measures.tokens_per_second(one.records)
        ratios = [speed(of.get(name)) for of in (one.speed, one.decoding) for name in bases]
        rows.append([one.method, figure(rate, 1), *ratios])
    return table(heads, rows)


def speed(found: Estimate | None) -> str:
    """A speed-up with its interval, and a question mark where the interval contains 1."""
    if found is None or math.isnan(found.value):
        return "-"
    return f"{figure(found)}x{'' if found.sure or math.isnan(found.low) else ' ?'}"


def split_table(own: Sequence[Summary]) -> list[str]:
    """A table of the shares of time, for engines that report them."""
    rows = [(one.method, split) for one in own if (split := measures.time_split(one.records)) is not None]
    heads = ("method", "draft", "target", "verify", "other")
    return table(heads, [(method, *(f"{share:.0%}" for share in split.values())) for method, split in rows])


def accepted_table(own: Sequence[Summary]) -> list[str]:
    """A table of rounds by accepted tokens, and of the acceptance at each draft position."""
    rows = []
    for one in own:
        lengths, positions = measures.histogram(one.records), measures.acceptance_by_position(one.records)
        if positions:
            shown = [f"{share:.2f}" for share in positions[:POSITIONS]]
            rows.append((one.method, " ".join(map(str, lengths)), " ".join(shown)))
    if not rows:
        return ["No round drafted anything."]
    heads = ("method", "rounds with 0, 1, 2, ... accepted tokens", f"acceptance at position 1, 2, ... {POSITIONS}")
    return table(heads, rows)


def quality_table(own: Sequence[Summary]) -> list[str]:
    """A table of answer quality, of lossy and lossless rules; no lines where no answer was scored."""
    rows = [
        (_marked(one), figure(one.likelihood, 3), "-" if one.rouge is None else figure(one.rouge, 3))
        for one in own
        if one.likelihood is not None
    ]
    heads = ("method", "log-probability per token under the target", "ROUGE-L against plain decoding")
    return [*table(heads, rows), ""] if rows else []


def _marked(one: Summary) -> str:
    return one.method if one.lossless else f"{one.method} (lossy)"


def _regression(found: Sequence[Summary]) -> list[str]:
    """SpecDec++'s cost model, fitted to draftproof's answers; one row for each pair of models and kind of drafter."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for one in found:
        if one.cell.engine == OURS:
            cell = one.cell
            key = (cell.target, cell.dtype, cell.backend, cell.draft or "", cell.drafter.partition(":")[0])
            groups.setdefault(key, []).extend(one.records)
    rows = []
    for (target, dtype, backend, draft, kind), records in groups.items():
        plain = groups.get((target, dtype, backend, "", "none"), [])
        fit = None if kind == "none" else measures.regress([*records, *plain])
        if fit is not None:
            milliseconds = (f"{1000 * fit.draft:.2f}", f"{1000 * fit.target:.2f}")
            rows.append((target, draft or "-", kind, *milliseconds, f"{fit.r_squared:.3f}", str(fit.count)))
    if not rows:
        return ["## Cost model", "", "Too few answers with drafts to fit one."]
    heads = ("target", "draft", "drafter", "ms per drafted token", "ms per target call", "R squared", "answers")
    title = (
        "## Cost model: T = t_draft N_draft + t_target N_target, least squares over all answers, with the plain ones"
    )
    return [title, "", *table(heads, rows)]


def _notes(found: Sequence[Summary], metadata: dict[str, Any]) -> list[str]:
    """The methods in effect, as the engines reported them, and notes."""
    effective: dict[tuple[str, str], int] = {}
    for one in found:
        for name, count in one.effective.items():
            effective[one.method, name] = effective.get((one.method, name), 0) + count
    heads = ("method", "reported by the engine", "answers")
    lines = ["## In effect", "", *table(heads, [(*names, str(count)) for names, count in effective.items()])]
    if any(one.agrees is not None and one.agrees[0] < one.agrees[1] for one in found):
        lines += ["", "Greedy tokens can differ from plain ones in bfloat16 and float16: near ties round differently."]
    for one in found:
        if not one.cell.plain and not measures.total(one.records).num_draft_tokens:
            lines += ["", f"{one.method} drafted nothing on {one.setting.title}: this is plain decoding."]
    lines += [line for note in metadata.get("notes", ()) for line in ("", f"{note[:1].upper()}{note[1:]}.")]
    peak = metadata.get("peak_memory_of_process")
    if peak:
        lines += ["", f"Peak memory of the process with all models loaded: {peak / 1e9:.2f} GB."]
    if "finished" not in metadata:
        lines += ["", "The run is not finished: repeat its command to continue."]
    return lines


# --- pictures ---------------------------------------------------------------------------------------------------------


def write_plots(found: dict[Setting, list[Summary]], out: Path) -> list[str]:
    """Write the pictures into a run's folder, a panel for each setting; returns their names."""
    for name, draw in PLOTS.items():
        heights = [1.2 + 0.25 * len(own) for own in found.values()]
        figure = new_figure(8.0, sum(heights))
        panels = figure.subplots(len(found), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (setting, own) in zip(panels, found.items(), strict=True):
            draw(axes, own)
            axes.set_title(setting.title, fontsize="medium")
            axes.grid(alpha=0.3)
        save_figure(figure, out / name)
    return list(PLOTS)


def _bars(axes: Any, own: Sequence[Summary], of: Callable[[Summary], Estimate | None], label: str) -> None:
    """One bar for each method with its interval, the first on top, and a line at 1."""
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
    """The length of one side of an interval; 0 where there is no interval."""
    return max(high - low, 0.0) if high == high and low == low else 0.0  # noqa: PLR0124 - nan is not itself


def _efficiency(axes: Any, own: Sequence[Summary]) -> None:
    _bars(axes, own, lambda one: measures.block_efficiency(one.records), "tokens per target call")


def _speed(axes: Any, own: Sequence[Summary]) -> None:
    _bars(axes, own, lambda one: one.speed.get(PLAIN), "tokens a second over our plain decoding")


def _lengths(axes: Any, own: Sequence[Summary]) -> None:
    """One line for each method: the share of rounds by accepted tokens."""
    for place, one in enumerate(own):
        counts = measures.histogram(one.records)
        while counts and not counts[-1]:  # positions that were drafted but never accepted
            counts.pop()
        if len(counts) > 1:
            shares = [count / sum(counts) for count in counts]
            axes.plot(shares, _LINES[place // 10 % 2], markersize=3, linewidth=1, label=one.method)
    axes.set_xlabel("accepted tokens of a round")
    axes.set_ylabel("share of drafted rounds")
    if axes.has_data():
        axes.legend(fontsize="x-small", ncols=2)


PLOTS: dict[str, Draw] = {"efficiency.png": _efficiency, "speed.png": _speed, "accepted.png": _lengths}
