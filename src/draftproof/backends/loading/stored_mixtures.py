"""Mixtures of experts of transformers' models as native ones, whose weights are rounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.hf.quantized_modules import UNFIT
from draftproof.backends.hf.truncate import put, shallow
from draftproof.backends.lean.hybrid import beside_of
from draftproof.backends.lean.mixture import Mixture, NoRouter, StoredMixture
from draftproof.backends.lean.mixture_modules import ParallelExperts, is_mixture, native_mixture, parts_of
from draftproof.backends.lean.traits import Experts, UnreadError
from draftproof.backends.products.rounding import GROUP, rounded_matrix
from draftproof.errors import UserError, reason


def with_rounded_experts(model: Any, bits: int, name: str) -> Any:
    """A copy of a model whose mixtures of experts are native, with weights of 4 or 8 bits; routers stay as they are.

    Without experts it is the model itself; everything else is shared.
    """
    blocks = {path: each for path, each in model.named_modules() if is_mixture(each)}
    inside = tuple(f"{path}." for path in blocks)
    for path, weight in model.named_parameters():  # a convolution over channels has a size of 1
        if weight.dim() == 3 and min(weight.shape) > 1 and not path.startswith(inside):
            raise _refused(name, path, f"it has the shape {tuple(weight.shape)}")
    if not blocks:
        return model
    copied: dict[str, Any] = {"": shallow(model)}
    for path, block in blocks.items():
        beside = beside_of(block)
        try:
            made = StoredMixture(_rounded(block, bits, beside))
        except (UnreadError, *UNFIT) as cause:
            raise _refused(name, path, reason(cause)) from cause
        put(copied, path if beside is None else f"{path}.{beside.experts}", made)
        if beside is not None:
            put(copied, f"{path}.{beside.router}", NoRouter())
    return copied[""]


def _refused(name: str, path: str, why: str) -> UserError:
    return UserError(
        f"{name} cannot be rounded: its {path} is no mixture of experts with a native form ({why}); take a checkpoint "
        "that is quantized already"
    )


@torch.inference_mode()
def _rounded(block: Any, bits: int, beside: ParallelExperts | None) -> Mixture:
    """The native mixture of a module, with rounded weights."""
    parts = parts_of(block, beside)
    whole = native_mixture(_unpacked(parts), Experts(parts.count, parts.chosen))
    return native_mixture(_in_few_bits(parts, bits), parts.routing(whole))


def _unpacked(parts: SimpleNamespace) -> SimpleNamespace:
    """The same parts; products that are made of them do not take the places of the module's own layers."""
    made = SimpleNamespace(**vars(parts))
    if parts.weighed:
        made.shared_expert = SimpleNamespace(**_layers(parts.shared_expert))
    return made


def _layers(shared: Any) -> dict[str, SimpleNamespace]:
    layers = {name: getattr(shared, name) for name in ("gate_proj", "up_proj", "down_proj")}
    if any(each.bias is not None for each in layers.values()):
        raise UnreadError("its shared expert has biases")
    return {name: SimpleNamespace(weight=each.weight.detach(), bias=None) for name, each in layers.items()}


def _in_few_bits(parts: SimpleNamespace, bits: int) -> SimpleNamespace:
    """The same with experts of few bits."""
    made = _unpacked(parts)
    for name in ("experts", *(["shared_expert"] if parts.weighed else [])):
        layers = vars(getattr(made, name))
        setattr(made, name, SimpleNamespace(**{kind: _few(layer.weight, bits) for kind, layer in layers.items()}))
    return made


def _few(weight: Float[Tensor, "out in"], bits: int) -> SimpleNamespace:
    if weight.shape[1] % GROUP:
        raise UnreadError(f"its experts read {weight.shape[1]} numbers, no multiple of {GROUP}")
    return SimpleNamespace(weight=rounded_matrix(weight, bits), bias=None)
