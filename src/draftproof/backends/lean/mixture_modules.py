"""Mixtures of experts of transformers' models as native ones, whose weights stay where they are.

What a router does (how scores are made of logits, and whether shares add up to 1) is not read from its code: native
mixtures of all known kinds are compared with the module itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from draftproof import native
from draftproof.backends.hf.native_modules import QuantizedExperts, says_experts
from draftproof.backends.hf.quantized_modules import UNFIT, QuantizedLinear
from draftproof.backends.lean.mixture import Mixture, behind_norm
from draftproof.backends.lean.traits import LLAMA, Experts, UnreadError, activation_of, eps_of
from draftproof.backends.model_info import relative_error
from draftproof.native.operations import MOST_EXPERTS

_ROWS = 3  # of each kind that are compared; the middle one counts
_DRAWN = 32  # rows of each kind, of which those are taken whose experts are chosen most clearly
_SAME = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # relative differences that rounding explains
_ROUNDED = 3e-2  # the same where the module rounds its inputs to 8 bits
_LOW = -15.0  # logits of experts whose sigmoids are so small that what is added to their sum is seen
_LEAST = (0.0, 1e-6)  # what may be added
_ROUTED = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # the same of logits of experts without their mean
_KNOWN: Any = WeakIdKeyDictionary()  # by a router's weight: how its modules are set, and what it does


@dataclass(frozen=True)
class ParallelExperts:
    """Names of what a layer has where experts are beside its gated part, and no module is around them."""

    experts: str  # module of the experts
    router: str  # what chooses them, by rows that it norms itself without weights
    experts_in: str  # norm of the same rows, for the experts
    experts_out: str  # of what they make
    gated_out: str  # of what the gated part makes, before both are added


def is_mixture(module: nn.Module) -> bool:
    """Whether a module is made of experts, and what chooses them."""
    return any(map(says_experts, module.children()))


@torch.inference_mode()
def mixture_of(block: Any, beside: ParallelExperts | None = None) -> Mixture:
    """The native mixture of a module, or of a layer that has experts beside its gated part.

    Nothing is copied but a router that is beside its experts.

    Raises:
        UnreadError: a part that is not known here, or the mixture computes something else.
    """
    try:
        parts = parts_of(block, beside)
        made = native_mixture(parts, Experts(parts.count, parts.chosen), in_place=True)
        made.route(parts.routing(made))
    except UNFIT as cause:
        raise UnreadError(f"its {type(block).__name__} has parts that do not fit together ({cause})") from cause
    return made


def native_mixture(parts: SimpleNamespace, experts: Experts, *, in_place: bool = False) -> Mixture:
    """The mixture of some parts; `in_place` as of `Mixture`."""
    experts = replace(experts, shared=parts.weighed, weighed=parts.weighed)
    traits = replace(LLAMA, experts=experts, activation=parts.activation, gate_up=("gate_up_proj",))
    like = torch.empty(0, dtype=parts.gate.weight.dtype)
    return Mixture(parts, traits, like, parts.scales, parts.biases, in_place=in_place)


def parts_of(block: Any, beside: ParallelExperts | None = None) -> SimpleNamespace:
    """What a mixture is made of, under the names that `Mixture` has; and what else is known of it.

    Its `routing` says, of a native mixture of the parts, what the module's router does (`routing_of`). Arguments as of
    `mixture_of`.
    """
    if beside is not None:
        return _parts_beside(*(getattr(block, name) for name in (beside.router, beside.experts, beside.experts_in)))
    (experts,) = (each for each in block.children() if says_experts(each))
    known = {"shared_expert", "shared_expert_gate"}
    others = {name for name, each in block.named_children() if each is not experts}
    routers = others - known
    if routers not in ({"gate"}, {"router"}) or others & known not in (set(), known):
        raise UnreadError(f"it has the parts {', '.join(sorted(others))}")
    router, (count, size, _) = block.get_submodule(routers.pop()), experts.down_proj.shape
    made = _experts_of(experts, router.weight, int(router.top_k))
    made.biases = _biases_of(block, router, count)
    made.factor = float(getattr(router, "routed_scaling_factor", 1.0))
    made.weighed = bool(others & known)
    made.routing = partial(_known_routing, block, made, router.weight, tuple(map(_settings, (block, router, experts))))
    if made.weighed:
        made.shared_expert = block.shared_expert
        made.shared_expert_gate = block.shared_expert_gate
        activation = activation_of(block.shared_expert.act_fn)
        if activation != made.activation:
            raise UnreadError(f"the gates of its shared expert are {activation}, and those of others {made.activation}")
        found = [tuple(getattr(block.shared_expert, name).weight.shape) for name in (*LLAMA.gate_up, "down_proj")]
        inner = found[-1][-1]
        if found != [(inner, size), (inner, size), (size, inner)]:
            raise UnreadError(f"its shared expert has weights of {', '.join(map(str, found))}")
    return made


def _experts_of(
    experts: Any, router: Float[Tensor, "experts dim"], chosen: int, bias: Tensor | None = None
) -> SimpleNamespace:
    """Parts of experts of which a router with this weight chooses so many, without what else a mixture may have."""
    if not experts.has_gate or experts.has_bias or experts.is_transposed:
        raise UnreadError("its experts have biases, no gates, or their weights another way round")
    count, (_, size, inner) = int(experts.num_experts), experts.down_proj.shape
    if tuple(router.shape) != (count, size) or not 1 <= chosen <= count <= MOST_EXPERTS:
        raise UnreadError(f"its router chooses {chosen} experts by weights of {tuple(router.shape)}")
    weights = experts.gate_up_proj, experts.down_proj
    shapes = [tuple(each.shape) for each in weights]
    if shapes != [(count, 2 * inner, size), (count, size, inner)] or not all(each.is_contiguous() for each in weights):
        raise UnreadError(f"its experts have weights of {' and '.join(map(str, shapes))}, or not one after another")
    dtype = router.dtype
    if experts.down_proj.dtype != dtype:
        raise UnreadError(f"its router has weights of {dtype}, and its experts of {experts.down_proj.dtype}")
    if dtype not in _SAME or native.operations_for(router) is None:
        raise UnreadError(f"there are no native operations on {dtype}, or they are off ({native.VARIABLE})")
    few = experts.quantized if isinstance(experts, QuantizedExperts) else {}
    return SimpleNamespace(
        count=count,
        chosen=chosen,
        activation=activation_of(experts.act_fn),
        biases=None,
        scales=None,
        factor=1.0,
        rounds=bool(few),
        weighed=False,
        gate=_linear_of(router, bias),
        experts=SimpleNamespace(
            **{
                part: SimpleNamespace(weight=few.get(part, getattr(experts, part).detach().flatten(0, 1)), bias=None)
                for part in ("gate_up_proj", "down_proj")
            }
        ),
    )


def _parts_beside(router: Any, experts: Any, norm: Any) -> SimpleNamespace:
    """`parts_of` where they are parts of a layer.

    The rows of the router are those of the experts but for scales, so its weight can take these.
    """
    size, eps = experts.down_proj.shape[1], eps_of(norm)
    own = {name for name, _ in (*router.named_parameters(recurse=False), *router.named_buffers(recurse=False))}
    own |= {name for name, _ in router.named_children()}
    if own != {"norm", "proj", "scale", "per_expert_scale"}:
        raise UnreadError(f"its router has the parts {', '.join(sorted(own))}")
    if eps_of(router.norm) != eps:
        raise UnreadError("its router and its experts read rows with different norms")
    linear, like = router.proj, experts.down_proj
    rounds = isinstance(linear, QuantizedLinear)
    of_norm = norm(like.new_ones(1, size))[0] * (1 + eps) ** 0.5  # its weights, and what is added to them
    weight, bias = (linear.product.dense(), linear.product.bias) if rounds else (linear.weight, linear.bias)
    weight = behind_norm(weight, router.scale.float() * router.scalar_root_size, of_norm, like.dtype)
    x = torch.randn((_ROWS, size), generator=torch.Generator().manual_seed(0)).to(like.dtype)
    probabilities, shares, chosen = router(x)
    made = _experts_of(experts, weight, chosen.shape[-1], bias)
    made.scales = scales = router.per_expert_scale
    if tuple(scales.shape) != (made.count,):
        raise UnreadError(f"its router has scales of {tuple(scales.shape)}, for {made.count} experts")

    def routing(mixture: Mixture) -> Experts:
        read = norm(x)
        logits = mixture.router(read).float()
        top, first = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)  # of equal ones the first, as in C
        top, first = top[:, : made.chosen], first[:, : made.chosen]
        likeliest = probabilities.topk(made.chosen).values
        pairs = (  # what the router makes of logits; these, up to what is added to all; and what experts make of both
            (likeliest / likeliest.sum(-1, keepdim=True), shares / scales[chosen], _SAME[torch.float32]),
            (_less_mean(probabilities.log()), _less_mean(logits), _ROUNDED if rounds else _ROUTED[like.dtype]),
            (
                experts(read, first, top / top.sum(-1, keepdim=True) * scales[first]),
                mixture(read),
                _ROUNDED if made.rounds else _SAME[like.dtype],
            ),
        )
        if not all(relative_error(found, expected) <= most for expected, found, most in pairs):
            raise UnreadError(f"a native mixture like its {type(experts).__name__} computes something else")
        return Experts(made.count, made.chosen)

    made.routing = routing
    return made


def _less_mean(rows: Float[Tensor, "rows out"]) -> Float[Tensor, "rows out"]:
    return rows - rows.mean(-1, keepdim=True)


def _linear_of(weight: Float[Tensor, "out in"], bias: Tensor | None) -> nn.Linear:
    """A linear layer with a weight that is elsewhere, too."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


def _biases_of(block: Any, router: Any, count: int) -> Tensor | None:
    """The numbers that are added to the scores by which experts are chosen."""
    found = []
    for owner in (block, router):
        named = itertools.chain(owner.named_parameters(recurse=False), owner.named_buffers(recurse=False))
        found += [(name, each) for name, each in named if owner is block or name != "weight"]
    if len(found) > 1 or any(tuple(each.shape) != (count,) for _, each in found):
        raise UnreadError(f"it has numbers that are not known here ({', '.join(sorted(name for name, _ in found))})")
    return found[0][1] if found else None


def _kinds(parts: SimpleNamespace) -> Iterator[Experts]:
    """What a router may do."""
    experts = Experts(parts.count, parts.chosen, factor=parts.factor)
    for sigmoid, whole in itertools.product((False, True), (True, False)):
        for least in _LEAST if sigmoid and whole else (0.0,):
            if sigmoid or parts.biases is None:
                yield replace(experts, sigmoid=sigmoid, whole=whole, least=least)


def _known_routing(
    block: Any, parts: SimpleNamespace, weight: Tensor, settings: tuple[Any, ...], mixture: Mixture
) -> Experts:
    """`routing_of`, which is asked several times while a model is loaded, and takes a second for some layers."""
    known: tuple[tuple[Any, ...], Experts] | None = _KNOWN.get(weight)
    if known is None or known[0] != settings:
        known = _KNOWN[weight] = settings, routing_of(block, parts, mixture)
    return known[1]


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """The class of a module and what is set in it beside its weights and modules, as far as it can be compared."""
    plain = {name: each for name, each in vars(module).items() if isinstance(each, bool | int | float | str)}
    own = {name: id(each) for name, each in vars(module).items() if callable(each)}
    return type(module), *sorted(plain.items()), *sorted(own.items())


@torch.inference_mode()
def routing_of(block: Any, parts: SimpleNamespace, mixture: Mixture) -> Experts:
    """What the router of a module does: with it a native mixture of the same weights computes the same."""
    weight = parts.gate.weight
    source = torch.Generator().manual_seed(0)
    usual = torch.randn((_DRAWN, weight.shape[1]), generator=source)
    low = _inputs_of(weight.float(), _LOW + torch.randn((_DRAWN, parts.count), generator=source))
    x = torch.cat([_clear(each.to(weight.dtype), parts, mixture) for each in (usual, low)])
    expected = block(x.unsqueeze(0)).view(x.shape).double()

    def off(experts: Experts) -> float:
        mixture.route(experts)
        errors = (mixture(x).double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        return float(errors.view(2, _ROWS).median(-1).values.max())

    found = {experts: off(experts) for experts in _kinds(parts)}
    best = min(found, key=lambda each: found[each])
    if not found[best] <= (_ROUNDED if parts.rounds else _SAME[weight.dtype]):
        raise UnreadError(f"a native mixture with the weights of its {type(block).__name__} computes something else")
    return best


def _clear(x: Float[Tensor, "rows dim"], parts: SimpleNamespace, mixture: Mixture) -> Float[Tensor, "some dim"]:
    """The rows whose least chosen expert is farthest from the next one: rounding of scores changes no choice there."""
    scores = mixture.router(x).float()
    if parts.biases is not None:
        scores = scores.sigmoid() + parts.biases.float()
    scores = scores.sort(dim=-1, descending=True).values
    if parts.chosen == parts.count:
        return x[:_ROWS]
    return x[(scores[:, parts.chosen - 1] - scores[:, parts.chosen]).topk(_ROWS).indices]


def _inputs_of(weight: Float[Tensor, "out in"], outputs: Float[Tensor, "rows out"]) -> Float[Tensor, "rows in"]:
    """Rows of which a linear layer makes the given outputs, or nearly so."""
    gram = weight @ weight.t()
    gram.diagonal().add_(1e-6 * gram.diagonal().mean().clamp(min=1e-6))
    made: Tensor = torch.linalg.solve(gram, outputs.t()).t() @ weight
    return made
