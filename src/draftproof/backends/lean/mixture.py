"""A mixture of experts as the feed-forward part of a layer, by native operations.

An expert's weights are read once for all tokens that chose it, and what a token gets has the same bits whatever other
tokens are in the pass (c/mixture.h). Weights of few bits stay so; others are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftproof import native
from draftproof.backends.lean.inputs import FusedProducts, linear_arguments, whole_product
from draftproof.backends.lean.traits import LLAMA, Experts, Traits, UnreadError
from draftproof.backends.products.packed_linear import PackedLinear, fuse, plain_of, release_pages, repacked
from draftproof.native import numa
from draftproof.native.ggml import GGMLWeight, StoredMatrix, why_not_joined
from draftproof.native.operations import ACTIVATIONS
from draftproof.native.structures import LinearArguments, MixtureArguments
from draftproof.native.tensors import LANES, Immutable, Quantized

_ZERO = 1e-6  # weights of a norm below it leave nothing of a number


class Mixture(Immutable):
    """What the experts that a router chooses make of rows.

    Args:
        mlp: its linear layers, under the names that `Traits.linear` has; weights of experts are [experts, out, in],
            matrices of few bits with all their outputs, or several quantized ones.
        scales: of the shares of each expert, if there are.
        biases: of the scores by which experts are chosen, if there are; shares are without them.
        in_place: whether weights stay where they are, as `inputs` reads them.
    """

    def __init__(
        self,
        mlp: Any,
        traits: Traits,
        like: Tensor,
        scales: Float[Tensor, " experts"] | None = None,
        biases: Float[Tensor, " experts"] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        experts, operations = traits.experts, native.operations_for(like)
        assert experts is not None, "the caller looked"
        assert operations is not None, "whoever reads experts wants native operations"
        self._operations = operations
        self._numbers = {
            name: each.detach().float().contiguous()
            for name, each in (("scales", scales), ("biases", biases))
            if each is not None
        }
        self.router = _product(mlp, "gate", in_place=in_place)  # gives the logits of the experts
        # what gates and ups, and what downs of all of them are
        self.experts = tuple(_Experts(mlp.experts, names, experts.count) for names in (traits.gate_up, ("down_proj",)))
        # for native.c; they hold addresses of tensors that are kept here
        self.arguments = MixtureArguments(
            router=linear_arguments(self.router),
            gate_up=self.experts[0].arguments,
            down=self.experts[1].arguments,
            size=self.experts[0].ins,
            experts=experts.count,
            chosen=experts.chosen,
            inner=self.experts[1].ins,
            activation=ACTIVATIONS.index(traits.activation),
            **{name: each.data_ptr() for name, each in self._numbers.items()},
        )
        if experts.shared:
            self._shared = _Shared(mlp, traits, weighed=experts.weighed, in_place=in_place)
            self._shared.write(self.arguments)
        self.route(experts)

    def route(self, experts: Experts) -> None:
        """Let a token's shares be made as these experts have them; their counts are those of the mixture."""
        for name in ("whole", "sigmoid", "factor", "least"):
            setattr(self.arguments, name, getattr(experts, name))

    def __call__(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """What they make of every row."""
        return self._operations.mixture(x, self.arguments)

    def onto(self, x: Float[Tensor, "tokens dim"], rows: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The same, added to `rows`."""
        return self(x).add_(rows)


class StoredMixture(nn.Module):
    """A mixture of experts of few bits, in the place of a model's own."""

    few_bits = rounds_inputs = True

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Float[Tensor, "*rows dim"], *_: Any) -> Float[Tensor, "*rows dim"]:
        """What the experts make of every row, which they choose themselves."""
        return self.mixture(x.reshape(-1, x.shape[-1])).view(x.shape)


class NoRouter(nn.Module):
    """In the place of a router beside experts that choose tokens themselves (`StoredMixture`)."""

    def forward(self, x: Float[Tensor, "tokens dim"]) -> tuple[Tensor, Tensor, Tensor]:
        """Three tensors that nothing reads."""
        return x, x, x


def behind_norm(
    router: Float[Tensor, "experts dim"],
    scale: Float[Tensor, " dim"],
    norm: Float[Tensor, " dim"],
    dtype: torch.dtype,
) -> Float[Tensor, "experts dim"]:
    """The weight of a router that reads what its experts read, in place of the same rows with scales of its own.

    Args:
        router: its own weight.
        scale: of the rows, normed without weights, that it reads.
        norm: weights of the norm of what experts read.
        dtype: of what is made.

    Raises:
        UnreadError: the norm has zeros.
    """
    if bool((norm.abs() < _ZERO).any()):
        raise UnreadError("the norm of what its experts read has zeros")
    return (router.float() * (scale.float() / norm.float())).to(dtype).contiguous()


class _Experts:
    """The weights of all experts that are multiplied with the same rows."""

    def __init__(self, owner: Any, names: Sequence[str], count: int) -> None:
        layers = [getattr(owner, name) for name in names]
        weights = [layer.weight for layer in layers]
        matrices = [weight for weight in weights if isinstance(weight, StoredMatrix)]
        self.weight: Any  # a tensor, or in a layout of native/
        group = 0
        stay = len(matrices) == len(weights) and why_not_joined(matrices) is None and not matrices[0].is_plain
        if stay and not any(len(each) % (count * LANES) or each.inputs is not None for each in matrices):
            self.weight = GGMLWeight.joined([repacked(each) for each in matrices], count)
            address, bits, _ = self.weight.arguments
        elif isinstance(weights[0], Quantized):
            self.weight = weights[0]
            address, bits, group = self.weight.arguments
        else:
            parts = [plain_of(each).view(count, -1, each.shape[-1]) for each in weights]
            alone = len(parts) == 1 and not matrices and parts[0].is_contiguous()
            self.weight = parts[0].detach() if alone else torch.cat(parts, 1)
            release_pages(weights)
            numa.interleave(self.weight)
            address, bits = self.weight.data_ptr(), 0
        self.ins = weights[0].ins if isinstance(weights[0], Quantized) else weights[0].shape[-1]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases, -1) if biases else None
        self.arguments = LinearArguments(address, None if self.bias is None else self.bias.data_ptr(), bits, group)


class _Shared:
    """The expert of all tokens."""

    def __init__(self, mlp: Any, traits: Traits, *, weighed: bool, in_place: bool) -> None:
        shared = mlp.shared_expert
        # gates and ups are apart, where those of other experts may be joint
        names = traits.gate_up if hasattr(shared, traits.gate_up[0]) else LLAMA.gate_up
        self.gate_up = (
            FusedProducts.of_modules([getattr(shared, name) for name in names])
            if in_place
            else FusedProducts.of(fuse(shared, names))
        )
        self.down = _product(shared, "down_proj", in_place=in_place)
        self.router: PackedLinear | None = None
        if weighed and in_place:
            self.router = whole_product(mlp.shared_expert_gate)
        elif weighed:
            self.router = PackedLinear(mlp.shared_expert_gate.weight.view(1, -1))

    def write(self, arguments: MixtureArguments) -> None:
        """Add it to those of a mixture."""
        arguments.shared_gate_up = self.gate_up.arguments
        arguments.shared_down = linear_arguments(self.down)
        arguments.shared_inner = self.down.weight.ins
        if self.router is not None:
            arguments.shared_router = linear_arguments(self.router)


def _product(owner: Any, name: str, *, in_place: bool) -> PackedLinear:
    return whole_product(getattr(owner, name)) if in_place else fuse(owner, [name])
