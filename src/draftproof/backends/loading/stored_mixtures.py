"""Mixtures of experts of transformers' models as native ones, whose weights are rounded.

What a router does (which scores are shares, and whether they add up to 1) is not read from its code: a native mixture
with the whole weights is compared with the module itself.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof import native
from draftproof.backends.hf.native_modules import says_experts
from draftproof.backends.hf.truncate import put, shallow
from draftproof.backends.lean.mixture import Mixture, StoredMixture
from draftproof.backends.lean.traits import LLAMA, Experts, UnreadError, activation_of
from draftproof.backends.products.rounding import GROUP, rounded_matrix
from draftproof.errors import UserError, reason
from draftproof.native.operations import MOST_EXPERTS

_ROWS = 7  # that are compared
_SAME = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # relative differences that rounding explains
_UNFIT = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of modules that do not fit in


def with_rounded_experts(model: Any, bits: int, name: str) -> Any:
    """A copy of a model whose mixtures of experts are native, with weights of 4 or 8 bits; routers stay as they are.

    Without experts it is the model itself; everything else is shared.

    Raises:
        UserError: experts that have no native form.
    """
    blocks = {path: each for path, each in model.named_modules() if any(map(says_experts, each.children()))}
    inside = tuple(f"{path}." for path in blocks)
    for path, weight in model.named_parameters():  # a convolution over channels has a size of 1
        if weight.dim() == 3 and min(weight.shape) > 1 and not path.startswith(inside):
            raise _refused(name, path, f"it has the shape {tuple(weight.shape)}")
    if not blocks:
        return model
    copied: dict[str, Any] = {"": shallow(model)}
    for path, block in blocks.items():
        try:
            put(copied, path, StoredMixture(_rounded(block, bits)))
        except (UnreadError, *_UNFIT) as cause:
            raise _refused(name, path, reason(cause)) from cause
    return copied[""]


def _refused(name: str, path: str, why: str) -> UserError:
    return UserError(
        f"{name} cannot be rounded: its {path} is no mixture of experts with a native form ({why}); take a checkpoint "
        "that is quantized already"
    )


def _rounded(block: Any, bits: int) -> Mixture:
    """The native mixture of a module, with rounded weights."""
    like = _parts(block).gate.weight
    if like.dtype not in _SAME or native.operations_for(like) is None:
        raise UnreadError(f"there are no native operations on {like.dtype}, or they are off ({native.VARIABLE})")
    x = torch.randn((1, _ROWS, like.shape[1]), generator=torch.Generator().manual_seed(0)).to(like.dtype)
    with torch.inference_mode():
        expected = block(x).double()
        for whole in (True, False):
            found = StoredMixture(_mixture(_parts(block), whole=whole))(x).double()
            if (found - expected).norm() <= _SAME[like.dtype] * expected.norm():
                return _mixture(_in_few_bits(_parts(block), bits), whole=whole)
    raise UnreadError("a native mixture with its weights computes something else")


def _mixture(parts: SimpleNamespace, *, whole: bool) -> Mixture:
    experts = Experts(parts.count, parts.chosen, whole, shared=parts.weighed, weighed=parts.weighed)
    traits = replace(LLAMA, experts=experts, activation=parts.activation, gate_up=("gate_up_proj",))
    return Mixture(parts, traits, torch.empty(0, dtype=parts.gate.weight.dtype))


def _parts(block: Any) -> SimpleNamespace:
    """What a mixture is made of, under the names that `lean.mixture` has.

    Raises:
        UnreadError: a part that is not known here.
    """
    (experts,) = (each for each in block.children() if says_experts(each))
    if not experts.has_gate or experts.has_bias or experts.is_transposed:
        raise UnreadError("its experts have biases, no gates, or their weights another way round")
    count, router = int(experts.num_experts), block.gate
    if tuple(router.weight.shape) != (count, experts.down_proj.shape[1]) or count > MOST_EXPERTS:
        raise UnreadError(f"its router has weights of {tuple(router.weight.shape)}")
    known = {"gate", "shared_expert", "shared_expert_gate"}
    names = {name for name, each in block.named_children() if each is not experts}
    if names not in ({"gate"}, known):
        raise UnreadError(f"it has the parts {', '.join(sorted(names))}")
    made = SimpleNamespace(
        count=count,
        chosen=int(router.top_k),
        activation=activation_of(experts.act_fn),
        weighed=names == known,
        gate=_linear(router.weight),
        experts=SimpleNamespace(
            gate_up_proj=_linear(experts.gate_up_proj.flatten(0, 1)), down_proj=_linear(experts.down_proj.flatten(0, 1))
        ),
    )
    if made.weighed:
        shared = block.shared_expert
        gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        made.shared_expert = SimpleNamespace(gate_up_proj=_linear(gate_up), down_proj=_linear(shared.down_proj.weight))
        made.shared_expert_gate = _linear(block.shared_expert_gate.weight)
    return made


def _linear(weight: Float[Tensor, "out in"]) -> SimpleNamespace:
    return SimpleNamespace(weight=weight.detach(), bias=None, out_features=len(weight))


def _in_few_bits(parts: SimpleNamespace, bits: int) -> SimpleNamespace:
    """The same with experts of few bits."""
    made = SimpleNamespace(**vars(parts))
    for name in ("experts", *(["shared_expert"] if parts.weighed else [])):
        layers = vars(getattr(parts, name))
        setattr(made, name, SimpleNamespace(**{kind: _few(layer.weight, bits) for kind, layer in layers.items()}))
    return made


def _few(weight: Float[Tensor, "out in"], bits: int) -> SimpleNamespace:
    if weight.shape[1] % GROUP:
        raise UnreadError(f"its experts read {weight.shape[1]} numbers, no multiple of {GROUP}")
    return SimpleNamespace(weight=rounded_matrix(weight, bits), bias=None, out_features=len(weight))
