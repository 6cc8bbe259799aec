"""Which modules of a transformers model are plain linear layers, and their weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float
from torch import Tensor, nn

from draftproof.backends.products.packed_linear import LinearSlice
from draftproof.native.tensors import Interleaved, Plain


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Modules that are plain linear layers, by path: of a class whose first member multiplies as one does."""
    plain: dict[type, bool] = {}
    found = {}
    for path, module in model.named_modules():
        matrix = matrix_of(module)
        if matrix is None:
            continue
        if type(module) not in plain:
            plain[type(module)] = type(module) is nn.Linear or _multiplies(module, matrix)
        if plain[type(module)]:
            found[path] = module
    return found


def packed_layers(model: nn.Module) -> dict[str, LinearSlice]:
    """Modules that stand for a linear layer whose whole weight is a native product of floats, by path."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, LinearSlice) and isinstance(module.product.weight, Interleaved | Plain):
            outs = torch.arange(module.product.weight.outs)
            if module.outputs.equal(outs):
                found[path] = module
    return found


def numbers_of(module: Any) -> Tensor:
    """The weight of a linear layer, in whatever order its numbers lie."""
    numbers: Tensor = module.product.numbers if isinstance(module, LinearSlice) else module.weight
    return numbers


def matrix_of(module: Any) -> Float[Tensor, "out in"] | None:
    """The weight of a module that looks like a linear layer; None for all others."""
    transposed = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    if not (transposed or isinstance(module, nn.Linear)) or type(module.weight) is not nn.Parameter:
        return None
    weight = module.weight.detach()
    if not weight.is_floating_point() or weight.dim() != 2 or weight.is_meta:
        return None
    return weight.t() if transposed else weight


def _multiplies(module: Any, matrix: Float[Tensor, "out in"]) -> bool:
    """Whether a module gives x W^T + b for a row, as rounding allows."""
    row = torch.linspace(-1, 1, matrix.shape[1], device=matrix.device, dtype=matrix.dtype).unsqueeze(0)
    try:
        with torch.inference_mode():
            made, expected = module(row), F.linear(row, matrix, module.bias)
            return made.shape == expected.shape and bool(torch.allclose(made, expected, rtol=0.01, atol=0.01))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
