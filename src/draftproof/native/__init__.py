"""The C library: its build, the choice of a level for this processor, and its functions on tensors.

Use it as `from draftproof import native`. The names below are loaded at their first use, because a wheel is built with
`native.build` where torch is not installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.native.dispatch import VARIABLE, levels, operations_for
    from draftproof.native.rows import block_plan, bonus_weights, draw, greedy, legal, race, softmax, spread

_HOMES = dict.fromkeys(("VARIABLE", "levels", "operations_for"), "dispatch")
_HOMES |= dict.fromkeys(("block_plan", "bonus_weights", "draw", "greedy", "legal", "race", "softmax", "spread"), "rows")

__all__ = [
    "VARIABLE",
    "block_plan",
    "bonus_weights",
    "draw",
    "greedy",
    "legal",
    "levels",
    "operations_for",
    "race",
    "softmax",
    "spread",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
