"""Test doubles and exact laws for users' own drafters and rules: EnumeratingRng, exact_law, total variation.

Knows: how to walk every outcome of a program whose only randomness is an Rng. Does not know: which program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.rng import Purpose

Outcome = TypeVar("Outcome", bound=Hashable)


class EnumeratingRng:
    """An Rng (and RoundRng) that follows a script of choices and records the choices there were.

    `exact_law` reruns a program with every script; the product of the probabilities along a script is `weight`. A
    choice of probability 0 is never taken and a certain one is not a choice, so impossible branches cost nothing.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = tuple(script)
        self.weight = 1.0
        self.taken: list[int] = []
        self.options: list[tuple[int, ...]] = []

    def at(self, purpose: Purpose, place: int = 0, rows: Sequence[int] | None = None) -> EnumeratingRng:  # noqa: ARG002
        """Every purpose shares the one walk."""
        return self

    def _choose(self, probs: Sequence[float]) -> int:
        open_choices = tuple(i for i, prob in enumerate(probs) if prob > 0)
        if not open_choices:
            raise ValueError(f"a draw from weights without mass: {list(probs)}")
        if len(open_choices) == 1:
            self.weight *= probs[open_choices[0]]
            return open_choices[0]
        step = len(self.taken)
        choice = self._script[step] if step < len(self._script) else open_choices[0]
        self.taken.append(choice)
        self.options.append(open_choices)
        self.weight *= probs[choice]
        return choice

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Each element is a choice between no and yes."""
        flat = [bool(self._choose((1.0 - x, x))) for x in prob.double().flatten().tolist()]
        return torch.tensor(flat, dtype=torch.bool).reshape(prob.shape)

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        """Each row is a choice among the indices with weight; weights are normalised here."""
        rows = weights.double().reshape(-1, weights.shape[-1])
        flat = [self._choose((row / row.sum()).tolist()) for row in rows]
        return torch.tensor(flat, dtype=torch.int64).reshape(weights.shape[:-1])


def exact_law(program: Callable[[EnumeratingRng], Outcome]) -> dict[Outcome, float]:
    """The probability of every outcome of a program, by running it once for each path of choices.

    Args:
        program: takes an EnumeratingRng and returns something hashable; deterministic apart from the Rng.
    """
    law: dict[Outcome, float] = {}
    script: tuple[int, ...] | None = ()
    while script is not None:
        rng = EnumeratingRng(script)
        outcome = program(rng)
        law[outcome] = law.get(outcome, 0.0) + rng.weight
        script = _next_script(rng)
    return law


def _next_script(rng: EnumeratingRng) -> tuple[int, ...] | None:
    """The depth-first successor of the walk just taken; None after the last."""
    for step in range(len(rng.taken) - 1, -1, -1):
        options = rng.options[step]
        place = options.index(rng.taken[step])
        if place + 1 < len(options):
            return (*rng.taken[:step], options[place + 1])
    return None


def total_variation(law: Mapping[Outcome, float], other: Mapping[Outcome, float]) -> float:
    """Half the sum of absolute differences between two laws; outcomes missing on one side have probability 0 there."""
    return 0.5 * sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in {*law, *other})
