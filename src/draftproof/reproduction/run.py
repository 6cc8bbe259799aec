"""Recipes run one after another into a folder: records and outcomes kept, a report that is written again after each.

A finished recipe is not measured again; one that was cut short goes on with the records it has. What is in the folder
belongs to one profile and one state of the recipes (FORMAT): anything else is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import UserError
from draftproof.files import whole_file
from draftproof.provenance import digest, provenance
from draftproof.reproduction.experiments import FORMAT, SMALL, SMOLLM2, STORIES, ExperimentProfile, Experiments
from draftproof.reproduction.plots import draw
from draftproof.reproduction.recipes.base import Recipe
from draftproof.reproduction.recipes.index import chosen
from draftproof.reproduction.report import markdown

REPORT = "reproduce"
PROFILES = {
    "quick": ExperimentProfile("quick", (STORIES, SMALL), prompts=24, seeds=2, tokens=48, places=20),
    "full": ExperimentProfile("full", (STORIES, SMALL, SMOLLM2), prompts=32, seeds=8, tokens=96, places=40, heavy=0.5),
}
Told = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Finished:
    """A recipe's outcome as it stands in the folder."""

    name: str
    content: Told


def profile_named(name: str) -> ExperimentProfile:
    """A profile.

    Raises:
        UserError: an unknown name.
    """
    if name not in PROFILES:
        raise UserError(f"profile is {name!r}: legal are {', '.join(PROFILES)}")
    return PROFILES[name]


def reproduce(
    names: Sequence[str], out: Path, profile: ExperimentProfile, *, tell: Tell = lambda _: None
) -> list[Finished]:
    """Run recipes and write the report of all that the folder then holds.

    Args:
        names: of recipes; none for all.
        out: a folder, made if it is not there; `reproduce.md`, `reproduce.json`, pictures and records go there.
        profile: how much is measured.
        tell: told what is done now, line by line.

    Returns:
        The outcomes of the recipes asked for.

    Raises:
        UserError: a name that is none, or a folder of another profile.
    """
    recipes = chosen(names)
    _claim_folder(out, profile)
    lab = Experiments(out / "records", profile, tell)
    made = []
    for number, recipe in enumerate(recipes, 1):
        tell(f"[{number}/{len(recipes)}] {recipe.name}: {recipe.paper.title}")
        made.append(_finished(recipe, lab, out))
        _report(out, profile, tell)
    return made


def _identity(profile: ExperimentProfile) -> Told:
    return {"format": FORMAT, "profile": asdict(profile)}


def _claim_folder(out: Path, profile: ExperimentProfile) -> None:
    """Write what the folder is for, or check it."""
    mark = out / "profile.json"
    wanted = json.loads(json.dumps(_identity(profile)))
    if mark.exists():
        if json.loads(mark.read_text(encoding="utf-8")) != wanted:
            raise UserError(f"{out} holds another profile or an older version of the recipes: name another folder")
        return
    out.mkdir(parents=True, exist_ok=True)
    with whole_file(mark) as work:
        work.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")


def _finished(recipe: Recipe, lab: Experiments, out: Path) -> Finished:
    """A recipe's outcome from the folder, measured and written first if it is not there."""
    file = out / "outcomes" / f"{recipe.name}.json"
    if not file.exists():
        start = time.perf_counter()
        outcome = recipe.measure(lab).to_dict()
        content = {
            "name": recipe.name,
            "how": recipe.how,
            "paper": asdict(recipe.paper),
            **outcome,
            "seconds": round(time.perf_counter() - start, 1),
        }
        with whole_file(file) as work:
            work.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return Finished(recipe.name, json.loads(file.read_text(encoding="utf-8")))


def _report(out: Path, profile: ExperimentProfile, tell: Tell) -> None:
    """Write the report of every outcome in the folder."""
    found = [
        json.loads(file.read_text(encoding="utf-8"))
        for recipe in chosen(())
        if (file := out / "outcomes" / f"{recipe.name}.json").exists()
    ]
    pictures = {each["name"]: draw(each, out, tell) for each in found if each["figure"]}
    origin = provenance(
        data=[], seed=0, metrics={}, seconds=sum(each["seconds"] for each in found), profile=asdict(profile)
    )
    with whole_file(out / f"{REPORT}.json") as work:
        told = {"provenance": origin, "tables": without_times(found), "recipes": found}
        work.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    with whole_file(out / f"{REPORT}.md") as work:
        work.write_text(markdown(found, profile.name, origin, pictures), encoding="utf-8")


def without_times(outcomes: Sequence[Told]) -> str:
    """A hash of everything in outcomes but seconds and what follows from them: equal for equal seeds."""
    kept = []
    for each in outcomes:
        dropped = {"seconds", "timed_claims", *(("figure", "claims") if each["how"] == "times" else ())}
        content = {key: value for key, value in each.items() if key not in dropped}
        for part in ("cells", "rows"):
            content[part] = [row for row in content[part] if not row["timed"]]
        kept.append(content)
    return digest(kept)
