"""The report of the recipes in Markdown: each paper's table with a mark for every number, our numbers, the claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftproof.errors import UserError
from draftproof.provenance import KEY, header, measured_at
from draftproof.results import new_figure, save_figure, table

Json = dict[str, Any]
SIGNS = {"reproduced": "●", "direction only": "○", "not reproduced": "×"}


def markdown(
    outcomes: Sequence[Json], profile: str, facts: Json, pictures: Mapping[str, str | None] | None = None
) -> str:
    """The whole report; `pictures` has file names by recipe."""
    lines = [
        "# The papers' tables and figures, reproduced",
        "",
        *header(facts),
        f"- Profile: {profile}.",
        "",
        "Each number of a paper has a mark: ● reproduced (equal within the stated tolerance), ○ direction only",
        "(another number, because models and data differ, and every claim it is part of holds here), × not reproduced",
        "(with the reason below the table). A claim is judged by an interval at 95%, from a bootstrap over prompts:",
        "runs of one prompt are kept together, compared columns are resampled together, and the percentiles are",
        "expanded for small samples. Computed values need no interval. Every claim is judged alone: of twenty claims",
        "without any effect, one would seem to hold or to be violated.",
        "BE: tokens per target call. Unless a row says whole runs, it is 1 + E[accepted | draft] at every position of",
        "the target's own text, with the same drafts for every rule. WS: speed over plain decoding by our engine.",
        "",
        *_overview(outcomes),
    ]
    for each in outcomes:
        lines += ["", *_section(each, (pictures or {}).get(each["name"]))]
    return "\n".join(lines) + "\n"


def _overview(outcomes: Sequence[Json]) -> list[str]:
    """A table with one row for each recipe: the numbers of its marks and verdicts."""
    rows = []
    for each in outcomes:
        marks = Counter(cell["mark"] for cell in each["cells"])
        verdicts = (_verdicts(each, kind) for kind in ("must hold", "depends on the models"))
        rows.append((f"[{each['name']}](#{_anchor(each)})", *(marks[mark] for mark in SIGNS), *verdicts))
    heads = ("recipe", "●", "○", "×", "claims that must hold", "claims that depend on the models")
    return table(heads, rows)


def _verdicts(outcome: Json, kind: str) -> str:
    counted = Counter(
        claim["verdict"] for claim in (*outcome["claims"], *outcome["timed_claims"]) if claim["kind"] == kind
    )
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items())) or "none"


def _anchor(outcome: Json) -> str:
    """The anchor of the recipe's heading, as Markdown viewers make it."""
    heading = f"{outcome['name']}: {outcome['paper']['title']}".lower()
    return "".join(c for c in heading if c.isalnum() or c in " -_").replace(" ", "-")


def _section(outcome: Json, picture: str | None) -> list[str]:
    paper = outcome["paper"]
    place = paper["place"]
    lines = [
        f"## {outcome['name']}: {paper['title']}",
        "",
        f"{place[:1].upper()}{place[1:]}. Paper: {paper['setting']}. Ours: {measured_at(outcome[KEY])}.",
    ]
    if paper["picture"]:
        lines += ["", "The paper gives the figure as a picture; it claims:"]
    elif paper["claims"]:
        lines += ["", "The paper concludes:"]
    lines += ["", *(f"- {claim}" for claim in paper["claims"])]
    lines += ["", *_table(outcome)]
    if reasons := _reasons(outcome):
        lines += ["", *reasons]
    if outcome["claims"] or outcome["timed_claims"]:
        lines += ["", *_claims(outcome)]
    lines += [line for note in outcome["notes"] for line in ("", note)]
    if picture:
        lines += ["", f"![{outcome['name']}]({picture})"]
    return lines


def _table(outcome: Json) -> list[str]:
    """The paper's rows with marks, then ours."""
    paper, rows = outcome["paper"], outcome["rows"]
    columns = list(dict.fromkeys([*paper["columns"], *(name for row in rows for name in row["values"])]))
    if not columns:
        return []
    marks = {(cell["row"], cell["column"]): cell["mark"] for cell in outcome["cells"]}
    lines = []
    for label, values in paper["rows"].items():
        theirs = dict(zip(paper["columns"], values, strict=True))
        spread = dict(zip(paper["columns"], paper["spreads"].get(label, [None] * len(values)), strict=True))
        shown = (_paper_value(theirs.get(name), spread.get(name), marks.get((label, name))) for name in columns)
        lines.append([label, *shown])
    for row in rows:
        shown = (number(row["values"][name]) if name in row["values"] else "" for name in columns)
        lines.append([f"**{row['label']}**", *shown])
    return table(["", *columns], lines)


def _paper_value(value: float | str | None, spread: float | None, mark: str | None) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else f"{value:.4g}"
    around = f" ± {spread:g}" if spread is not None else ""
    return f"{text}{around} {SIGNS[mark]}" if mark else text


def number(value: Json | str) -> str:
    """A number with its interval, if it has one."""
    if isinstance(value, str):
        return value
    middle, low, high = (_short(value[name]) for name in ("value", "low", "high"))
    return middle if value["count"] == 0 else f"{middle} [{low}, {high}]"


def _short(value: float | None) -> str:
    """Four digits; a rounding error of 0 is shown as 0."""
    if value is None:
        return "beyond"
    return f"{value if abs(value) > 1e-12 else 0:.4g}"


def _reasons(outcome: Json) -> list[str]:
    """The distinct reasons, each with its columns."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in outcome["cells"]:
        if cell["row"] == "picture":
            continue  # its claims have a table of their own
        if cell["column"] not in found.setdefault((cell["mark"], cell["reason"]), []):
            found[cell["mark"], cell["reason"]].append(cell["column"])
    return [f"- {SIGNS[mark]} {', '.join(columns)}: {reason}." for (mark, reason), columns in found.items() if reason]


def _claims(outcome: Json) -> list[str]:
    rows = [
        (claim["text"].replace("|", "\\|"), claim["kind"], number(claim["interval"]), f"**{claim['verdict']}**")
        for claim in (*outcome["claims"], *outcome["timed_claims"])
    ]
    return table(("claim", "kind", "number", "verdict"), rows)


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
