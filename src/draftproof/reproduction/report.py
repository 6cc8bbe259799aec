"""The report of the recipes as Markdown: the paper's table with a mark at every number, ours beside it, the claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Told = dict[str, Any]
SIGNS = {"reproduced": "●", "direction only": "○", "not reproduced": "×"}


def markdown(
    outcomes: Sequence[Told], profile: str, origin: Told, pictures: Mapping[str, str | None] | None = None
) -> str:
    """The whole report.

    Args:
        outcomes: of recipes.
        profile: its name.
        origin: where it comes from (versions, machine).
        pictures: file by recipe.
    """
    versions = ", ".join(f"{name} {value}" for name, value in origin["versions"].items())
    lines = [
        "# The papers' tables and figures, reproduced",
        "",
        f"Profile {profile}. {versions}; {origin['machine']['architecture']}, {origin['machine']['threads']} threads.",
        "",
        "Each number of a paper carries a mark: ● reproduced (equal within the tolerance stated), ○ direction only (it",
        "is another number, since models and data are, and every claim it is part of holds here), × not reproduced",
        "(the reason stands below the table). A claim is judged by an interval at 95%, a bootstrap over prompts: runs",
        "of one prompt are kept together, compared columns are resampled together, and the percentiles are expanded",
        "for small samples. Computed values need none. Each interval stands for itself: of twenty claims without any",
        "effect one would seem to hold or to be violated.",
        "BE: tokens a target call. Unless a row says whole runs, it is 1 + E[accepted | draft] at every place of the",
        "target's own text, the same drafts for every rule. WS: speed over plain decoding by our engine.",
        "",
        *_overview(outcomes),
    ]
    for each in outcomes:
        lines += ["", *_section(each, (pictures or {}).get(each["name"]))]
    return "\n".join(lines) + "\n"


def _overview(outcomes: Sequence[Told]) -> list[str]:
    """A row a recipe: marks and verdicts counted."""
    heads = ["recipe", "●", "○", "×", "claims that must hold", "claims that depend on the models"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for each in outcomes:
        marks = Counter(cell["mark"] for cell in each["cells"])
        lines.append(
            _row(
                [
                    f"[{each['name']}](#{_anchor(each)})",
                    *(str(marks[mark]) for mark in SIGNS),
                    *(_verdicts(each, kind) for kind in ("must hold", "depends on the models")),
                ]
            )
        )
    return lines


def _verdicts(outcome: Told, kind: str) -> str:
    counted = Counter(
        claim["verdict"] for claim in (*outcome["claims"], *outcome["timed_claims"]) if claim["kind"] == kind
    )
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items())) or "none"


def _anchor(outcome: Told) -> str:
    """As Markdown viewers make anchors of headings."""
    heading = f"{outcome['name']}: {outcome['paper']['title']}".lower()
    return "".join(c for c in heading if c.isalnum() or c in " -_").replace(" ", "-")


def _section(outcome: Told, picture: str | None) -> list[str]:
    paper = outcome["paper"]
    lines = [
        f"## {outcome['name']}: {paper['title']}",
        "",
        f"{_capital(paper['place'])}. Paper: {paper['setting']}.",
    ]
    if paper["picture"]:
        lines += ["", "The seed's text gives the figure as a picture; it claims:"]
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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(outcome: Told) -> list[str]:
    """The paper's rows with marks, then ours."""
    paper, rows = outcome["paper"], outcome["rows"]
    columns = list(dict.fromkeys([*paper["columns"], *(name for row in rows for name in row["values"])]))
    if not columns:
        return []
    marks = {(cell["row"], cell["column"]): cell["mark"] for cell in outcome["cells"]}
    lines = [_row(["", *columns]), _row(["---"] * (len(columns) + 1))]
    for label, values in paper["rows"].items():
        told = dict(zip(paper["columns"], values, strict=True))
        spread = dict(zip(paper["columns"], paper["spreads"].get(label, [None] * len(values)), strict=True))
        shown = [_paper_value(told.get(name), spread.get(name), marks.get((label, name))) for name in columns]
        lines.append(_row([label, *shown]))
    for row in rows:
        shown = [number(row["values"][name]) if name in row["values"] else "" for name in columns]
        lines.append(_row([f"**{row['label']}**", *shown]))
    return lines


def _paper_value(value: float | str | None, spread: float | None, mark: str | None) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else f"{value:.4g}"
    around = f" ± {spread:g}" if spread is not None else ""
    return f"{text}{around} {SIGNS[mark]}" if mark else text


def number(value: Told | str) -> str:
    """A number with its interval, where it has one."""
    if isinstance(value, str):
        return value
    middle, low, high = (_short(value[name]) for name in ("value", "low", "high"))
    return middle if value["clusters"] == 0 else f"{middle} [{low}, {high}]"


def _short(value: float | None) -> str:
    """Four digits; what rounding leaves of 0 is 0."""
    if value is None:
        return "beyond"
    return f"{value if abs(value) > 1e-12 else 0:.4g}"


def _reasons(outcome: Told) -> list[str]:
    """The distinct reasons, each with the columns it stands for."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in outcome["cells"]:
        if cell["row"] == "picture":
            continue  # the table of claims says it
        if cell["column"] not in found.setdefault((cell["mark"], cell["reason"]), []):
            found[cell["mark"], cell["reason"]].append(cell["column"])
    return [f"- {SIGNS[mark]} {', '.join(columns)}: {reason}." for (mark, reason), columns in found.items() if reason]


def _claims(outcome: Told) -> list[str]:
    heads = ["claim", "kind", "number", "verdict"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for claim in (*outcome["claims"], *outcome["timed_claims"]):
        told = number(claim["interval"])
        lines.append(_row([claim["text"].replace("|", "\\|"), claim["kind"], told, f"**{claim['verdict']}**"]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
