"""Embeddings of tokens that layers have of their own, beside the model's, for native code.

A pass makes those of all layers at its beginning: rows of a second table, and what a linear layer makes of the first
layer's input. In each layer gates of the hidden states let its part through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.lean.inputs import linear_arguments, whole_product
from draftproof.backends.lean.layers import Norm
from draftproof.backends.lean.traits import Traits, UnreadError, activation_of

_TABLE, _PROJECTION, _NORM = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
_FACTORS = ("per_layer_model_projection_scale", "per_layer_input_scale")


class EmbeddedPart:
    """What a layer makes of its embedding of each token.

    Args:
        parts: linear layer that makes gates, that behind them, and the norm of what is added.
    """

    def __init__(self, parts: Sequence[Any], traits: Traits) -> None:
        gate, out, norm = parts
        self._products = whole_product(gate), whole_product(out)
        self._norm = Norm(norm, offset=traits.offset)
        self.size = int(self._products[1].weight.ins)
        self.first = 0  # number in the embeddings of all layers; set by `LayerEmbeddings`
        if self._products[0].weight.outs != self.size or not self._norm.is_native:
            raise UnreadError("its layers have gates of other sizes than their own embeddings of tokens")

    @classmethod
    def of(cls, layer: Any, names: Sequence[str], traits: Traits) -> EmbeddedPart | None:
        """That of a layer whose parts have these names, the activation last; None where it has none of them."""
        found = [getattr(layer, name, None) for name in names]
        if all(each is None for each in found):
            return None
        if any(each is None for each in found) or activation_of(found[-1]) != traits.activation:
            raise UnreadError("its layers have only a part of what embeddings of their own need")
        return cls(found[:-1], traits)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Fields of `LayerArguments`; they hold addresses of tensors that are kept here."""
        gate, out = map(linear_arguments, self._products)
        return {
            "embedded_gate": gate,
            "embedded_out": out,
            "embedded": self._norm.scaled.data_ptr(),
            "embedded_least": self._norm.added,
            "embedded_size": self.size,
            "embedded_first": self.first,
        }


class LayerEmbeddings:
    """Embeddings of tokens in all layers, for those that read them."""

    def __init__(self, inner: Any, layers: Sequence[Any]) -> None:
        self._table = getattr(inner, _TABLE)
        self._product = whole_product(getattr(inner, _PROJECTION))
        self._norm = Norm(getattr(inner, _NORM))
        self._factors = [float(getattr(inner, name)) for name in _FACTORS]
        self._layers = len(layers)
        for number, layer in enumerate(layers):
            layer.embedded.first = number * layer.embedded.size
        sizes = {layer.embedded.size for layer in layers}
        if sizes != set(self._norm.shape) or self._product.weight.outs != len(layers) * max(sizes):
            raise UnreadError("its layers' own embeddings of tokens have other sizes than their table")

    @classmethod
    def of(cls, inner: Any, layers: Sequence[Any]) -> LayerEmbeddings | None:
        """Those of a model; None where its layers have none."""
        have = [layer.embedded is not None for layer in layers]
        if not any(have):
            return None
        if not all(have) or not all(hasattr(inner, name) for name in (_TABLE, _PROJECTION, _NORM, *_FACTORS)):
            raise UnreadError("some of its layers have embeddings of their own, or its table of them is not known here")
        return cls(inner, layers)

    def __call__(self, ids: Int[Tensor, " tokens"], x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens numbers"]:
        """Those of some tokens, one layer after another; x is what the first layer reads."""
        of_input, of_both = self._factors
        shape = (len(ids), self._layers, -1)
        made = self._norm((self._product(x) * of_input).view(shape))
        return made.add_(self._table(ids).view(shape)).mul_(of_both).flatten(1)
