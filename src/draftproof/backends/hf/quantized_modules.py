"""A transformers model whose linear layers and experts have 4- or 8-bit weights, as a second model beside it.

The second model is a shallow copy: everything but the quantized weights is shared with the first. The products are
those of `packed`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftproof import native
from draftproof.backends.hf.native_modules import native_experts, quantizing_experts
from draftproof.backends.hf.truncate import put, shallow
from draftproof.backends.model_info import quantization_method
from draftproof.backends.products.calibration import MEASURED_BITS, InputStatistics, MeasuredLinear
from draftproof.backends.products.calibration_files import measure
from draftproof.backends.products.linear_layers import linear_layers, matrix_of, numbers_of, packed_layers
from draftproof.backends.products.packed_linear import LinearSlice, PackedLinear, PlainProduct
from draftproof.errors import UserError, reason
from draftproof.native.tensors import BITS, MeasuredInputs

_log = logging.getLogger(__name__)

UNFIT = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of modules that do not fit in
_NO_LINEAR = "none of its layers is a plain linear layer"


class QuantizedLinear(nn.Module):
    """A linear layer that multiplies with a quantized copy of its weight.

    Args:
        weight: of the layer; still shown as its weight, for modules that look at it.
        whole: the product with it.
        output: whether it is the model's output layer (`PackedLinear.quantized_output`).
        inputs: what is known of its inputs; by default the errors of all weights count alike.
    """

    few_bits = rounds_inputs = True

    def __init__(
        self,
        weight: Tensor,
        whole: PackedLinear,
        bits: int,
        *,
        output: bool = False,
        inputs: MeasuredInputs | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False) if weight.is_meta else weight
        self.bias = whole.bias
        self.out_features, self.in_features = weight.shape
        if output:
            table = None if weight.is_meta else weight.detach()
            self.product = whole.quantized_output(bits, table, inputs)
        else:
            self.product = whole.quantized(bits, inputs=inputs)

    @classmethod
    def of(cls, layer: Any, bits: int, *, kept: bool = True, **options: Any) -> QuantizedLinear:
        """In the place of a linear layer; other options are arguments of the class.

        Where its weight is not `kept`, or is in another layout, one without memory is shown, of the same shape.
        """
        packed = isinstance(layer, LinearSlice) and not isinstance(layer.product, PlainProduct)
        whole, weight = (layer.product, None) if packed else (None, layer.weight)
        if whole is None:
            matrix = layer.product.dense() if isinstance(layer, LinearSlice) else matrix_of(layer)
            assert matrix is not None, "the layer is linear"
            whole = PackedLinear(matrix, None if layer.bias is None else layer.bias.detach())
            weight = matrix if kept else None
        if weight is None:
            weight = torch.empty((whole.weight.outs, whole.weight.ins), device="meta", dtype=whole.numbers.dtype)
        return cls(weight, whole, bits, **options)

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The layer's outputs."""
        return self.product(x)


def quantizing(
    model: Any,
    bits: int,
    name: str,
    write: Callable[[Any, Collection[InputStatistics]], Iterator[None]] | None = None,
    *,
    kept: bool = True,
    target: bool = False,
) -> Iterator[Any]:
    """A copy of a model with quantized linear layers and experts, made in steps: None after each, and at last the copy.

    Experts are quantized where they are native (`native_modules`), and shared elsewhere. `write` lets a form of the
    model that measures its inputs write a text (`calibration.write`); without it all errors of weights count alike.

    A copy that is to be a `target` has an output layer of 8 bits, and no weights in two forms.

    Raises:
        UserError: another number of bits, weights that are quantized already or spread over devices, layers for which
            there is no quantized product; nearly always before the first step.
    """
    if bits not in BITS:
        raise UserError(f"bits of the weights of {name}: expected {' or '.join(map(str, BITS))}, got {bits}")
    layers: dict[str, Any] = linear_layers(model) | packed_layers(model)
    why = _why_not(model, layers, bits)
    if why is not None:
        raise UserError(f"{name} cannot be quantized: {why}; it can be drafted for by another drafter")
    head = model.get_output_embeddings()
    yield None
    statistics = {layer: InputStatistics() for layer in layers.values()}
    if write is not None and bits == MEASURED_BITS:
        try:
            names = {layer: path for path, layer in layers.items()}
            by_name = {names[layer]: each for layer, each in statistics.items()}
            weights = {names[layer]: numbers_of(layer) for layer in statistics}
            measured = partial(write, _measured(model, layers, statistics))
            yield from measure(by_name, weights, measured, name=name, kept=kept)
        except UNFIT as cause:
            _log.debug("%s is quantized without measuring its inputs: %s", name, reason(cause))
            statistics = {layer: InputStatistics() for layer in layers.values()}
    twin = shallow(model)
    copied: dict[str, Any] = {"": twin}
    made: dict[nn.Module, nn.Module] = {}
    for path, layer in layers.items():
        if layer not in made:  # a layer may stand at several places
            # A target's output layer decides what is written, so it keeps more bits than the others.
            own, output = (BITS[-1], False) if target and layer is head else (bits, layer is head)
            inputs = statistics[layer].found() if own == bits else None
            made[layer] = QuantizedLinear.of(layer, own, output=output, inputs=inputs, kept=not target)
            yield None
        put(copied, path, made[layer])
    for path, module in model.named_modules():
        experts = native_experts(module)
        if experts is not None:
            put(copied, path, (yield from quantizing_experts(experts, bits)))
    try:  # a model's code may read weights that are not there now, which only a pass shows
        with torch.inference_mode():
            twin(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    except UNFIT as cause:
        raise UserError(
            f"{name} does not work with quantized layers ({type(cause).__name__}: {reason(cause)})"
        ) from cause
    yield twin


def _measured(model: Any, layers: dict[str, Any], statistics: Mapping[nn.Module, InputStatistics]) -> Any:
    """A copy of the model whose linear layers add to the statistics of their inputs."""
    twin = shallow(model)
    copied: dict[str, Any] = {"": twin}
    for path, layer in layers.items():
        put(copied, path, MeasuredLinear(layer, statistics[layer]))
    return twin


def _why_not(model: Any, layers: dict[str, Any], bits: int) -> str | None:
    """Why a model has no quantized copy here."""
    method = quantization_method(model)
    head = model.get_output_embeddings()
    if not layers or (method is not None and all(layer is head for layer in layers.values())):
        return f"its weights are quantized already ({method})" if method else _NO_LINEAR
    if any(hasattr(each, "_hf_hook") for each in model.modules()):
        return "its layers are spread over devices or moved while it runs"
    weights = [numbers_of(each) for each in layers.values()]
    kinds = {(each.device.type, each.dtype) for each in weights}
    if len(kinds) > 1:
        shown = ", ".join(sorted(f"{device} {dtype}" for device, dtype in kinds))
        return f"its linear layers have several kinds of weights ({shown})"
    matrices = [matrix for each in layers.values() if (matrix := matrix_of(each)) is not None]
    if weights[0].device.type != "cpu":
        return PackedLinear(matrices[0], pack=False).why_not_quantized(bits)
    if native.operations_for(weights[0]) is None:
        return f"there are no native products of {weights[0].dtype} here (and DRAFTPROOF_NATIVE must not be 0)"
    return None
