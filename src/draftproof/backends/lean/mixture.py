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
from draftproof.backends.lean.traits import Experts, Traits
from draftproof.backends.products.packed_linear import PackedLinear, SplitProduct, fuse, let_go, plain_of, repacked
from draftproof.native.ggml import GGMLWeight, StoredMatrix, why_not_joined
from draftproof.native.operations import ACTIVATIONS
from draftproof.native.structures import LinearArguments, MixtureArguments
from draftproof.native.tensors import LANES


class Mixture:
    """What the experts that a router chooses make of rows.

    Args:
        mlp: its linear layers, under the names that `Traits.linear` has; weights of experts are [experts, out, in], or
            matrices of few bits with all their outputs.
        scales: of the shares of each expert, if there are.
    """

    def __init__(self, mlp: Any, traits: Traits, like: Tensor, scales: Float[Tensor, " experts"] | None = None) -> None:
        experts, operations = traits.experts, native.operations_for(like)
        assert experts is not None, "the caller looked"
        assert operations is not None, "whoever reads experts wants native operations"
        self._operations = operations
        self._scales = None if scales is None else scales.float().contiguous()
        self.router = fuse(mlp, ["gate"])  # gives the logits of the experts
        # what gates and ups, and what downs of all of them are
        self.experts = tuple(_Experts(mlp.experts, names, experts.count) for names in (traits.gate_up, ("down_proj",)))
        self._shared = _shared(mlp, traits, experts)
        # for native.c; they hold addresses of tensors that are kept here
        self.arguments = MixtureArguments(
            router=linear_arguments(self.router),
            gate_up=self.experts[0].arguments,
            down=self.experts[1].arguments,
            size=self.experts[0].ins,
            experts=experts.count,
            chosen=experts.chosen,
            inner=self.experts[1].ins,
            whole=experts.whole,
            activation=ACTIVATIONS.index(traits.activation),
            factor=experts.factor,
            scales=None if self._scales is None else self._scales.data_ptr(),
            **{name: linear_arguments(product) for name, product in self._shared.items()},
            shared_inner=self._shared["shared_down"].weight.ins if self._shared else 0,
        )

    def __deepcopy__(self, memo: object) -> Mixture:
        return self  # C has its addresses, and nothing changes it

    def __call__(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """What they make of every row."""
        return self._operations.mixture(x, self.arguments)

    def onto(self, x: Float[Tensor, "tokens dim"], rows: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The same, added to `rows`."""
        return self(x).add_(rows)


class StoredMixture(nn.Module):
    """A mixture of experts of few bits, in the place of a model's own.

    Args:
        mixture: what computes it.

    Attributes:
        mixture: as given.
    """

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Float[Tensor, "*rows dim"], *_: Any) -> Float[Tensor, "*rows dim"]:
        """What the experts make of every row, which they choose themselves."""
        return self.mixture(x.reshape(-1, x.shape[-1])).view(x.shape)


class _Experts:
    """The weights of all experts that are multiplied with the same rows."""

    def __init__(self, owner: Any, names: Sequence[str], count: int) -> None:
        layers = [getattr(owner, name) for name in names]
        weights = [layer.weight for layer in layers]
        matrices = [weight for weight in weights if isinstance(weight, StoredMatrix)]
        self.weight: GGMLWeight | Tensor
        stay = len(matrices) == len(weights) and why_not_joined(matrices) is None and not matrices[0].is_plain
        if stay and not any(len(each) % (count * LANES) or each.inputs is not None for each in matrices):
            self.weight = GGMLWeight.joined([repacked(each) for each in matrices], count)
            address, bits, _ = self.weight.arguments
        else:
            self.weight = torch.cat([plain_of(each).view(count, -1, each.shape[-1]) for each in weights], 1)
            let_go(weights)
            address, bits = self.weight.data_ptr(), 0
        self.ins = weights[0].shape[-1]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases, -1) if biases else None
        self.arguments = LinearArguments(address, None if self.bias is None else self.bias.data_ptr(), bits, 0)


def _shared(mlp: Any, traits: Traits, experts: Experts) -> dict[str, PackedLinear]:
    if not experts.shared:
        return {}
    gate_up = fuse(mlp.shared_expert, traits.gate_up)
    made = {
        "shared_gate_up": PackedLinear(gate_up.dense()) if isinstance(gate_up, SplitProduct) else gate_up,
        "shared_down": fuse(mlp.shared_expert, ["down_proj"]),
    }
    if experts.weighed:
        made["shared_router"] = PackedLinear(mlp.shared_expert_gate.weight.view(1, -1))
    return made


def linear_arguments(product: PackedLinear) -> LinearArguments:
    """A native product for native.c; it holds addresses."""
    address, bits, group = product.weight.arguments
    return LinearArguments(address, None if product.bias is None else product.bias.data_ptr(), bits, group)
