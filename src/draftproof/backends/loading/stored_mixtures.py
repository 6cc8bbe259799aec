"""Mixtures of experts of transformers' models as native ones, whose weights are rounded in groups of 32 inputs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from draftproof.backends.hf.quantized_modules import UNFIT
from draftproof.backends.hf.truncate import put, shallow
from draftproof.backends.lean.hybrid import beside_of
from draftproof.backends.lean.mixture import Mixture, NoRouter, StoredMixture
from draftproof.backends.lean.mixture_modules import ParallelExperts, is_mixture, native_mixture, parts_of
from draftproof.backends.lean.traits import LLAMA, Experts, UnreadError
from draftproof.errors import UserError, reason
from draftproof.native.ggml import Q8_0, WORDS, StoredMatrix

_GROUP = 32  # inputs that share a scale
_SHARES = (1.0, 0.92, 0.84)  # of a group's range, that are tried with 4 bits: what lies beyond is cut off
_TOGETHER = 1 << 22  # numbers that are rounded together, which bounds the memory beside


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
    """The native mixture of a module, with rounded weights; what its router does is seen with the whole ones."""
    parts = parts_of(block, beside)
    routing = parts.routing(native_mixture(parts, Experts(parts.count, parts.chosen), in_place=True))
    parts.experts = _in_few_bits(parts.experts, ("gate_up_proj", "down_proj"), bits)
    if parts.weighed:
        parts.shared_expert = _in_few_bits(parts.shared_expert, (*LLAMA.gate_up, "down_proj"), bits)
    return native_mixture(parts, routing)


def _in_few_bits(owner: Any, names: Sequence[str], bits: int) -> SimpleNamespace:
    """Linear layers with rounded weights, under the same names."""
    made = {}
    for name in names:
        layer = getattr(owner, name)
        if layer.bias is not None or layer.weight.shape[1] % _GROUP:
            raise UnreadError(
                f"its {name} has biases, or reads {layer.weight.shape[1]} numbers, no multiple of {_GROUP}"
            )
        made[name] = SimpleNamespace(weight=rounded_matrix(layer.weight.detach(), bits), bias=None)
    return SimpleNamespace(**made)


def rounded_matrix(weight: Float[Tensor, "out in"], bits: int) -> StoredMatrix:
    """A weight in the nearest numbers of 8 bits, or of 4 with a scale and a zero for each group by least squared error.

    Raises:
        ValueError: other bits, or a number of inputs that groups do not divide.
    """
    outs, ins = weight.shape
    if bits not in (4, 8) or ins % _GROUP:
        raise ValueError(f"expected 4 or 8 bits and inputs in groups of {_GROUP}, got {bits} bits and {ins} inputs")
    rows = max(1, _TOGETHER // ins)
    blocks = _of_eight if bits == 8 else _of_four
    content = torch.cat([blocks(part.float().view(-1, _GROUP)).flatten() for part in torch.split(weight, rows)])
    return StoredMatrix(content, outs, ins, Q8_0 if bits == 8 else WORDS[_GROUP], weight.dtype)


def _of_eight(groups: Float[Tensor, "groups 32"]) -> UInt8[Tensor, "groups bytes"]:
    scales = _held(groups.abs().amax(-1, keepdim=True) / 127)
    numbers = (groups / scales).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scales.half().view(torch.uint8), numbers.view(torch.uint8)), -1)


def _of_four(groups: Float[Tensor, "groups 32"]) -> UInt8[Tensor, "groups bytes"]:
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    chosen = [torch.empty_like(low), torch.empty_like(low), torch.empty_like(groups)]
    for share in _SHARES:
        scales = _held((high - low) * (share / 15))
        zeros = (-low * share / scales).round_().clamp_(0, 15)
        numbers = (groups / scales + zeros).round_().clamp_(0, 15)
        error = ((numbers - zeros) * scales - groups).square_().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        chosen = [torch.where(better, new, old) for new, old in zip((scales, zeros, numbers), chosen, strict=True)]
    scales, zeros, numbers = chosen
    pairs = numbers.to(torch.uint8).view(len(groups), -1, 2)
    return torch.cat((scales.half().view(torch.uint8), zeros.to(torch.uint8), pairs[..., 0] | pairs[..., 1] << 4), -1)


def _held(scales: Tensor) -> Tensor:
    """Scales that float16 holds, and that something can be divided by."""
    return scales.half().float().clamp_(min=2.0**-24)
