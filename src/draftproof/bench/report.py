"""The report of a run: Markdown for people, the same figures as JSON.

Knows: tables, words, how a figure is written. Does not know: how anything is measured or computed.

Tables of counts come first and of times after: with the same seeds a second run repeats the former to the letter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftproof.bench import measures
from draftproof.bench.cell import OURS
from draftproof.bench.estimate import FEWEST, LEVEL, RESAMPLES, Estimate
from draftproof.bench.plots import write_plots
from draftproof.bench.record import Record
from draftproof.bench.summary import BASES, Setting, Summary, summarize
from draftproof.errors import UserError
from draftproof.files import whole_file

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


def write_report(out: Path, *, plots: bool = True) -> list[Summary]:
    """Write report.md, figures.json and, where matplotlib is installed, the plots of a run's folder.

    Args:
        out: the folder.
        plots: whether pictures are wanted.

    Raises:
        UserError: no run there.
    """
    found, told = summarize(out)
    if not found:
        raise UserError(f"{out} holds no record yet: repeat the command of its run")
    drawn = write_plots(by_setting(found), out) if plots else []
    text = markdown(found, told, drawn)
    figures = json.dumps([one.to_dict() for one in found], indent=1) + "\n"
    for name, content in ((REPORT, text), (FIGURES, figures)):
        with whole_file(out / name) as work:
            work.write_text(content, encoding="utf-8")
    return found


def markdown(found: Sequence[Summary], told: dict[str, Any], plots: Sequence[str] = ()) -> str:
    """The report of summaries; `plots` are names of pictures beside it."""
    lines = ["# Benchmark", "", *_origin(told), ""]
    for setting, own in by_setting(found).items():
        lines += [f"## {setting.title}", "", *count_table(own), "", *speed_table(own), "", *split_table(own), ""]
        lines += [*accepted_table(own), "", *quality_table(own)]
    lines += [*_regression(found), "", *_notes(found, told)]
    lines += [line for name in plots for line in ("", f"![{name.partition('.')[0]}]({name})")]
    return "\n".join(lines) + "\n"


def by_setting(found: Iterable[Summary]) -> dict[Setting, list[Summary]]:
    """Summaries of each setting, in order."""
    made: dict[Setting, list[Summary]] = {}
    for one in found:
        made.setdefault(one.setting, []).append(one)
    return made


def _origin(told: dict[str, Any]) -> list[str]:
    """What was run, where, how."""
    machine, versions = told["machine"], told["versions"]
    cells = told["cells"]
    dtypes = ", ".join(dict.fromkeys(cell["dtype"] for cell in cells))
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(cell["seed"] for cell in cells))
    lengths = ", ".join(str(count) for count in dict.fromkeys(cell["max_tokens"] for cell in cells))
    where = machine.get("accelerator") or machine["processor"]
    asked = ", ".join(f"{name} ({data['questions']})" for name, data in told["data"].items())
    ran = ", ".join(f"{name} {version}" for name, version in versions.items())
    threads = f"{machine['threads']} threads on {machine['cores']} cores ({machine['architecture']})"
    if machine.get("native"):
        threads += f", native operations for {' and '.join(machine['native'])}"
    loads = [told[name] for name in ("load", "load_at_end") if name in told]
    load = f" Load average: {' and at the end '.join(f'{each:.1f}' for each in loads)}." if loads else ""
    return [
        f"Models: {', '.join(told['models'])}; dtype {dtypes}; batch 1, up to {lengths} tokens; seeds {seeds}.",
        f"Questions: {asked}. Repeats of each answer: {told['repeats']}; thrown away first: {told['warmup']} a method.",
        f"Machine: {where}, {threads}. Versions: {ran}. Begun {told['begun']}.{load}",
        "",
        f"Order: {told['order']}.",
        f"Intervals: {LEVEL:.0%}, expanded percentile bootstrap over questions ({RESAMPLES} resamples); none under",
        f"{FEWEST} questions; of many intervals some miss.",
        "A speed is the median over questions of the ratio to the baseline's answer to the same question in the same",
        "turn. `over token`: the ratio of tokens per target call to rule token on one chain with the same stopper.",
        "`?` marks an interval that holds 1.",
    ]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def figure(found: Estimate, digits: int = 2) -> str:
    """A value with its interval."""
    if math.isnan(found.value):
        return "-"
    if math.isnan(found.low):
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def count_table(own: Sequence[Summary]) -> list[str]:
    """What was generated and accepted."""
    return table(COUNT_HEADS, [count_row(one) for one in own])


def count_row(one: Summary) -> list[str]:
    """A method's counts."""
    return [
        _marked(one),
        figure(measures.block_efficiency(one.records)),
        "-" if one.gain is None else f"{figure(one.gain, 3)}{'' if one.gain.sure else ' ?'}",
        figure(measures.mean_accepted(one.records)),
        _share(one),
        figure(measures.discard_rate(one.records)),
        figure(measures.verification_rate(one.records)),
        "-" if one.flops is None else f"{one.flops / 1e9:.3g}",
        "-" if one.agrees is None else f"{one.agrees[0]} of {one.agrees[1]}",
    ]


def _share(one: Summary) -> str:
    stats = measures.total(measures.first(one.records))
    return f"{stats.num_accepted_tokens / stats.num_draft_tokens:.0%}" if stats.num_draft_tokens else "-"


def speed_table(own: Sequence[Summary]) -> list[str]:
    """Speed over every baseline that was measured."""
    bases = [name for name in BASES if any(name in one.speed for one in own)]
    heads = ("method", "tokens a second", *(f"over {name}" for name in bases))
    rows = []
    for one in own:
        rate = measures.tokens_per_second(one.records)
        rows.append([one.method, figure(rate, 1), *(speed(one.speed.get(name)) for name in bases)])
    return table(heads, rows)


def speed(found: Estimate | None) -> str:
    """A speed-up, with a mark where it may be none."""
    if found is None or math.isnan(found.value):
        return "-"
    return f"{figure(found)}x{'' if found.sure or math.isnan(found.low) else ' ?'}"


def split_table(own: Sequence[Summary]) -> list[str]:
    """Where the time went, as far as engines tell."""
    rows = [(one.method, split) for one in own if (split := measures.time_split(one.records)) is not None]
    heads = ("method", "draft", "target", "verify", "other")
    return table(heads, [(method, *(f"{share:.0%}" for share in split.values())) for method, split in rows])


def accepted_table(own: Sequence[Summary]) -> list[str]:
    """Rounds by accepted tokens, and acceptance at each place of a draft."""
    rows = []
    for one in own:
        lengths, places = measures.histogram(one.records), measures.acceptance_by_position(one.records)
        if places:
            shown = [f"{share:.2f}" for share in places[:POSITIONS]]
            rows.append((one.method, " ".join(map(str, lengths)), " ".join(shown)))
    if not rows:
        return ["No round drafted anything."]
    heads = ("method", "rounds with 0, 1, 2, ... accepted tokens", f"emitted of drafted at place 1, 2, ... {POSITIONS}")
    return table(heads, rows)


def quality_table(own: Sequence[Summary]) -> list[str]:
    """What lossy rules cost, beside lossless ones; nothing where no answer was scored."""
    rows = [
        (_marked(one), figure(one.likelihood, 3), "-" if one.rouge is None else figure(one.rouge, 3))
        for one in own
        if one.likelihood is not None
    ]
    heads = ("method", "log-probability a token under the target", "ROUGE-L against plain decoding")
    return [*table(heads, rows), ""] if rows else []


def _marked(one: Summary) -> str:
    return one.method if one.lossless else f"{one.method} (lossy)"


def _regression(found: Sequence[Summary]) -> list[str]:
    """SpecDec++'s cost model fitted to our engine's answers, a line a pair and kind of drafter."""
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
    heads = ("target", "draft", "drafter", "ms a drafted token", "ms a target call", "R squared", "answers")
    title = "## Cost model: T = t_draft N_draft + t_target N_target, least squares over answers, plain ones included"
    return [title, "", *table(heads, rows)]


def _notes(found: Sequence[Summary], told: dict[str, Any]) -> list[str]:
    """What was in effect, by each engine's own word, and memory."""
    effective: dict[tuple[str, str], int] = {}
    for one in found:
        for name, count in one.effective.items():
            effective[one.method, name] = effective.get((one.method, name), 0) + count
    heads = ("method", "by the engine's own word", "answers")
    lines = ["## In effect", "", *table(heads, [(*names, str(count)) for names, count in effective.items()])]
    if any(one.agrees is not None and one.agrees[0] < one.agrees[1] for one in found):
        lines += ["", "Greedy tokens that differ from plain ones: in bfloat16 and float16 near-ties round differently."]
    for one in found:
        if not one.cell.plain and not measures.total(one.records).num_draft_tokens:
            lines += ["", f"{one.method} drafted nothing on {one.setting.title}: there it is plain decoding."]
    lines += [line for note in told.get("notes", ()) for line in ("", f"{note[:1].upper()}{note[1:]}.")]
    peak = told.get("peak_memory_of_process")
    if peak:
        lines += ["", f"Most memory held by the process, all models loaded: {peak / 1e9:.2f} GB."]
    if "finished" not in told:
        lines += ["", "The run is not finished: repeat its command to go on."]
    return lines
