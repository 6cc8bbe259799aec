"""Functions of other packages that are replaced for a while, so that their random choices can be enumerated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from draftproof.rng import Rng


class _Uniforms:
    """In place of a tensor of uniforms that is only compared: each comparison is a draw of our Rng."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def __le__(self, prob: Tensor) -> Tensor:
        return self._rng.bernoulli(prob.clamp(max=1))

    __lt__ = __le__


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or a class within the block."""
    before = {name: vars(owner)[name] for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def enumerated_draws(rng: Rng) -> AbstractContextManager[None]:
    """Within the block torch's draws of one token, and uniforms that are only compared, come from an Rng."""

    def multinomial(weights: Tensor, num_samples: int = 1, **_: Any) -> Tensor:
        assert num_samples == 1, f"{num_samples} draws per row: only one can be enumerated"
        return rng.categorical(weights).unsqueeze(-1)

    return patched(torch, rand_like=lambda *_, **__: _Uniforms(rng), multinomial=multinomial)
