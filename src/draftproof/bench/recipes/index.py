"""Every recipe by its name.

Knows: the modules that hold recipes. Does not know: what any of them measures.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.bench.recipes import seed000, seed001, seed002
from draftproof.bench.recipes.base import Recipe
from draftproof.errors import UserError

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for module in (seed000, seed001, seed002) for recipe in module.RECIPES
}


def chosen(names: Sequence[str]) -> list[Recipe]:
    """Recipes by name, in their own order; all of them without a name.

    Raises:
        UserError: a name that is none, saying which there are.
    """
    for name in names:
        if name not in RECIPES:
            raise UserError(f"recipe is {name!r}: legal are {', '.join(RECIPES)}")
    return [recipe for name, recipe in RECIPES.items() if not names or name in names]
