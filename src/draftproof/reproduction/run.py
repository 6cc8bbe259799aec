"""Run recipes one after another; records and outcomes are kept in a folder, the report is written after each recipe.

A finished recipe is not measured again. One that was interrupted continues with the records that exist. A folder
belongs to one profile and one version of the recipes (FORMAT); another one is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftproof.errors import UserError, refuse_unknown
from draftproof.files import remembered, write_json, write_text
from draftproof.provenance import KEY, digest, run_facts
from draftproof.reproduction.experiments import (
    FORMAT,
    SMALL,
    SMOLLM2,
    STORIES,
    ExperimentProfile,
    Experiments,
    Notify,
    ignore,
)
from draftproof.reproduction.recipes import (
    block_verification,
    block_verification_v1,
    couplings,
    heads,
    passes,
    small_verifiers,
    specdec_pp,
    spectr,
    sprinter,
)
from draftproof.reproduction.recipes.base import Recipe
from draftproof.reproduction.report import draw, markdown

_MODULES = (
    couplings,
    block_verification_v1,
    block_verification,
    spectr,
    specdec_pp,
    passes,
    heads,
    sprinter,
    small_verifiers,
)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in sorted((recipe for module in _MODULES for recipe in module.RECIPES), key=lambda each: each.name)
}


def chosen(names: Sequence[str]) -> list[Recipe]:
    """Recipes by name, in the order of the list; all recipes if no name is given."""
    for name in names:
        refuse_unknown("recipe", name, RECIPES)
    return [recipe for name, recipe in RECIPES.items() if not names or name in names]


REPORT = "reproduce"
PROFILES = {
    "quick": ExperimentProfile("quick", (STORIES, SMALL), prompts=24, seeds=2, tokens=48, places=20),
    "full": ExperimentProfile("full", (STORIES, SMALL, SMOLLM2), prompts=32, seeds=8, tokens=96, places=40, heavy=0.5),
}
Json = dict[str, Any]


def reproduce(names: Sequence[str], out: Path, profile: ExperimentProfile, *, notify: Notify = ignore) -> list[Json]:
    """Run recipes (all, if none is named), and write the report of all outcomes in the folder.

    Args:
        names: of recipes.
        out: a folder, made if it does not exist: for `reproduce.md`, `reproduce.json`, pictures and records.
        profile: the amount of measurements.
        notify: called with a line about the current work.
    """
    recipes, facts = chosen(names), run_facts()
    _claim_folder(out, profile)
    experiments = Experiments(out / "records", profile, notify)
    made = []
    for number, recipe in enumerate(recipes, 1):
        notify(f"[{number}/{len(recipes)}] {recipe.name}: {recipe.paper.title}")
        made.append(_finished(recipe, experiments, out, facts))
        _report(out, profile, facts, notify)
    return made


def _claim_folder(out: Path, profile: ExperimentProfile) -> None:
    """Write the profile of a new folder, or check the profile of an old one."""
    identity = json.loads(json.dumps({"format": FORMAT, "profile": asdict(profile)}))
    if remembered(out / "profile.json", lambda: identity) != identity:
        raise UserError(f"{out} holds another profile or an older version of the recipes: name another folder")


def _finished(recipe: Recipe, experiments: Experiments, out: Path, facts: Json) -> Json:
    """A recipe's outcome from the folder, measured and written first if it is not there."""

    def measure() -> Json:
        start = time.perf_counter()
        outcome = recipe.measure(experiments).to_dict()
        about = {KEY: facts, "name": recipe.name, "how": recipe.how, "paper": asdict(recipe.paper)}
        return {**about, **outcome, "seconds": round(time.perf_counter() - start, 1)}

    return remembered(out / "outcomes" / f"{recipe.name}.json", measure)


def _report(out: Path, profile: ExperimentProfile, facts: Json, notify: Notify) -> None:
    """Write the report of every outcome in the folder."""
    files = [out / "outcomes" / f"{name}.json" for name in RECIPES]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    pictures = {each["name"]: draw(each, out, notify) for each in found if each["figure"]}
    content = {KEY: facts, "profile": asdict(profile), "tables": without_times(found), "recipes": found}
    write_json(out / f"{REPORT}.json", content)
    write_text(out / f"{REPORT}.md", markdown(found, profile.name, facts, pictures))


def without_times(outcomes: Sequence[Json]) -> str:
    """A hash of outcomes without times and the numbers computed from them; equal for equal seeds."""
    kept = []
    for each in outcomes:
        dropped = {KEY, "seconds", "timed_claims", *(("figure", "claims") if each["how"] == "times" else ())}
        content = {key: value for key, value in each.items() if key not in dropped}
        for part in ("cells", "rows"):
            content[part] = [row for row in content[part] if not row["timed"]]
        kept.append(content)
    return digest(kept)
