"""Functions of single numbers whose last digits do not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float
from torch import Tensor

_UNIT = 64  # numbers that torch computes as whole vectors on every processor


def evenly(x: Float[Tensor, "*rows dim"], function: Callable[[Tensor], Tensor]) -> Float[Tensor, "*rows dim"]:
    """A function of every number; torch computes what is left of a vector by another one, whose last digits differ."""
    dim = x.shape[-1]
    return function(F.pad(x, (0, -dim % _UNIT)))[..., :dim] if dim % _UNIT else function(x)
