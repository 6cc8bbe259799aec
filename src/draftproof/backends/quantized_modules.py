"""A transformers model whose linear layers have 4- or 8-bit weights, as a second model beside it.

The second model is a shallow copy: everything but the quantized weights is shared with the first. The products are
those of `packed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float
from torch import Tensor, nn

from draftproof.backends.cutting import shallow
from draftproof.backends.facts import quantization_method
from draftproof.backends.packed import Product
from draftproof.errors import UserError, reason
from draftproof.kernels import native
from draftproof.kernels.operations import BITS

_NO_LINEAR = "none of its layers is a plain linear layer"


class QuantizedLinear(nn.Module):
    """A linear layer that multiplies with a quantized copy of its weight.

    Args:
        weight: of the layer; still shown as its weight, for modules that look at it.
        bias: if there is one.
        bits: of a quantized weight.
        output: whether it is the model's output layer (`Product.quantized_output`).
    """

    def __init__(
        self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, bits: int, *, output: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        whole = Product(weight.detach(), None if bias is None else bias.detach())
        self._product = whole.quantized_output(bits, weight.detach()) if output else whole.quantized(bits)

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The layer's outputs."""
        return self._product(x)


def quantizing(model: Any, bits: int, name: str) -> Iterator[Any]:
    """A copy of a model with quantized linear layers, made in steps: None after each step, and at last the copy.

    Args:
        model: a transformers causal LM, in eval mode.
        bits: of a weight.
        name: the model's, for errors.

    Raises:
        UserError: another number of bits, weights that are quantized already or spread over devices, layers for which
            there is no quantized product; nearly always before the first step.
    """
    if bits not in BITS:
        raise UserError(f"{bits} bits for the weights of {name}: legal are {' and '.join(map(str, BITS))}")
    layers = _linear_layers(model)
    why = _why_not(model, layers, bits)
    if why is not None:
        raise UserError(f"{name} cannot be quantized: {why}; it can be drafted for by another drafter")
    head = model.get_output_embeddings()
    yield None
    twin = shallow(model)
    copied: dict[str, Any] = {"": twin}
    made: dict[nn.Module, nn.Module] = {}
    for path, layer in layers.items():
        if layer not in made:
            made[layer] = _quantized(layer, bits, output=layer is head)
            yield None
        _put(copied, path, made[layer])
    try:
        with torch.inference_mode():
            twin(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as cause:
        raise UserError(
            f"{name} does not work with quantized layers ({type(cause).__name__}: {reason(cause)})"
        ) from cause
    yield twin


def _linear_layers(model: nn.Module) -> dict[str, Any]:
    """Modules that are plain linear layers, by path: of a class whose first member multiplies as one does."""
    plain: dict[type, bool] = {}
    found = {}
    for path, module in model.named_modules():
        matrix = _matrix(module)
        if matrix is None:
            continue
        if type(module) not in plain:
            plain[type(module)] = type(module) is nn.Linear or _multiplies(module, matrix)
        if plain[type(module)]:
            found[path] = module
    return found


def _matrix(module: Any) -> Float[Tensor, "out in"] | None:
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


def _why_not(model: Any, layers: dict[str, Any], bits: int) -> str | None:
    """Why a model has no quantized copy here."""
    method = quantization_method(model)
    head = model.get_output_embeddings()
    if not layers or (method is not None and all(layer is head for layer in layers.values())):
        return f"its weights are quantized already ({method})" if method else _NO_LINEAR
    if any(hasattr(each, "_hf_hook") for each in model.modules()):
        return "its layers are spread over devices or moved while it runs"
    weights = [each.weight for each in layers.values()]
    kinds = {(each.device.type, each.dtype) for each in weights}
    if len(kinds) > 1:
        shown = ", ".join(sorted(f"{device} {dtype}" for device, dtype in kinds))
        return f"its linear layers have several kinds of weights ({shown})"
    matrices = [matrix for each in layers.values() if (matrix := _matrix(each)) is not None]
    if weights[0].device.type != "cpu":
        return Product(matrices[0], pack=False).why_not_quantized(bits)
    operations = native.operations(weights[0])
    if operations is None:
        return f"there are no native products of {weights[0].dtype} here (and DRAFTPROOF_NATIVE must not be 0)"
    unfit = sorted(ins for ins in {matrix.shape[1] for matrix in matrices} if not operations.multiplies(ins))
    return f"native products do not take {unfit[0]} inputs" if unfit else None


def _quantized(layer: Any, bits: int, *, output: bool) -> nn.Module:
    matrix = _matrix(layer)
    assert matrix is not None, "the caller chose linear layers"
    return QuantizedLinear(matrix.detach(), layer.bias, bits, output=output)


def _put(copied: dict[str, Any], path: str, layer: nn.Module) -> None:
    """Replace the module at a path of the copy, and every module above it by a copy of its own."""
    *above, last = path.split(".")
    owner, here = copied[""], ""
    for part in above:
        here = f"{here}.{part}" if here else part
        if here not in copied:
            copied[here] = shallow(owner.get_submodule(part))
            owner.add_module(part, copied[here])
        owner = copied[here]
    owner.add_module(last, layer)
