"""Every recipe by its name."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.errors import refuse_unknown
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
