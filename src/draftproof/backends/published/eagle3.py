"""EAGLE-3 heads (arXiv 2503.01840) as published: `speculators`' layout, and SafeAILab's.

The input at a token is its embedding and the target's hidden states of several layers at the token before, which one
product fuses. The first layer's attention reads both side by side; the head's own states, before their last norm, take
the place of the fused ones for drafted tokens. It drafts from a part of the vocabulary, which the map d2t names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.following import FollowingBackend
from draftproof.backends.layout import Layout
from draftproof.backends.lean_layers import Embedding, Norm
from draftproof.backends.packed import Product
from draftproof.backends.published.files import (
    ALGORITHM,
    HeadFiles,
    cast,
    drafted_ids,
    read_head,
    refuse_other_algorithm,
    refuse_other_target,
)
from draftproof.backends.published.layers import LayerShape, Passes, make_layer, make_norm
from draftproof.backends.slot_cache import SlotCache
from draftproof.backends.slots import SlotBackend
from draftproof.errors import UserError

_NESTED, _ORIGINAL = "layers.0.", "midlayer."  # where the first layer's weights are


class Eagle3Net:
    """The network of an EAGLE-3 head.

    Args:
        files: of the head.
        target: the model it was made for.

    Attributes:
        width: of its states.
        layers: of the target, whose hidden states it reads.
        ids: tokens that it can draft; None for all.

    Raises:
        UserError: made for another model, weights that do not fit the config, or parts that are not read here.
    """

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        flags = {name: bool(files.config.get(name)) for name in _FLAGS}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            raise UserError(f"the head {files.source!r} has norm_before_fc and fc_norm: legal is one of them")
        self._norms_output, self._norms_residual = flags["norm_output"], flags["norm_before_residual"]
        shape = LayerShape.of(files, None if ALGORITHM in files.config else "llama")
        self.layers = _layers(files, target)
        given = files.config.get("target_hidden_size") or shape.size
        refuse_other_target(files, target, hidden=int(given), vocab=_vocabulary(files, shape))
        self.width = shape.size
        own = files.optional("embed_tokens.weight", [target.vocab_size, shape.size])
        self.embed = _embedding(files, shape, target) if own is None else Embedding(cast(own, target))
        features = len(self.layers) * int(given)
        self._norm_all = make_norm(files, shape, "input_norm", target, features) if flags["norm_before_fc"] else None
        self._norm_each: list[Norm] = []
        if flags["fc_norm"]:
            each = range(len(self.layers))
            self._norm_each = [make_norm(files, shape, f"fc_norm.{number}", target, int(given)) for number in each]
        bias = files.optional("fc.bias", [shape.size])
        weight = cast(files.take("fc.weight", [shape.size, features]), target)
        self._fc = Product(weight, None if bias is None else cast(bias, target))
        at = _ORIGINAL if f"{_ORIGINAL}hidden_norm.weight" in files.tensors else _NESTED
        self._hidden_norm = make_norm(files, shape, f"{at}hidden_norm", target)
        self._decoder = [make_layer(files, shape, at, 0, target, wide=2)]
        self._decoder += [
            make_layer(files, shape, f"layers.{number}.", number, target) for number in range(1, len(shape.windows))
        ]
        self._norm = make_norm(files, shape, "norm", target)
        self._passes = Passes(shape, self._decoder, target)
        self.ids, self._head = _output(files, shape, target)
        for unused in ("verifier_lm_head.weight", "verifier_norm.weight"):
            files.tensors.pop(unused, None)

    def fuse(self, states: Float[Tensor, "tokens inner"]) -> Float[Tensor, "tokens dim"]:
        """The target's states of all layers, in one product."""
        if self._norm_all is not None:
            states = self._norm_all(states)
        elif self._norm_each:
            parts = states.chunk(len(self._norm_each), -1)
            states = torch.cat([norm(part.contiguous()) for norm, part in zip(self._norm_each, parts, strict=True)], -1)
        return self._fc(states)

    def __call__(
        self,
        states: Float[Tensor, "rows width dim"],
        embedded: Float[Tensor, "rows width dim"],
        layout: Layout,
        cache: SlotCache,
    ) -> Float[Tensor, "rows width dim"]:
        """See `HeadNet`."""
        at, masks = self._passes(states, layout, cache)
        first, *others = self._decoder
        x = states.flatten(0, 1)
        normed = self._hidden_norm(x)
        both = torch.cat([first.normed(embedded.flatten(0, 1)), normed], -1)
        x = first.attend(both, normed if self._norms_residual else x, at, masks[first.kind])
        for layer in others:
            x = layer(x, at, masks[layer.kind])
        return (self._norm(x) if self._norms_output else x).view(states.shape)

    def logits(self, states: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens ids"]:
        """See `HeadNet`."""
        return self._head(states if self._norms_output else self._norm(states))


_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _layers(files: HeadFiles, target: SlotBackend) -> tuple[int, ...]:
    """The layers of the target whose states are read: of the config, else a low, a middle and a high one."""
    named: Any = files.config.get("eagle_aux_hidden_state_layer_ids")
    if named is None:
        named = (files.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    total = target.facts.layers
    found = [2, total // 2, total - 3] if named is None else named
    sane = isinstance(found, list) and all(isinstance(each, int) and 0 <= each <= total for each in found)
    if not found or not sane or len(set(found)) < len(found):
        said = "without a list of layers" if named is None else f"whose layers are {named}"
        raise UserError(
            f"the head {files.source!r}, {said}, cannot read the hidden states of {target.name}, which has {total} "
            f"layers: legal are different numbers from 0 to {total}; take a head that was made for this target"
        )
    return tuple(found)


def _vocabulary(files: HeadFiles, shape: LayerShape) -> int:
    """The size of the target's vocabulary that a head was made for."""
    mask = files.tensors.get("t2d")
    return shape.vocab if mask is None else mask.shape[0]


def _embedding(files: HeadFiles, shape: LayerShape, target: SlotBackend) -> Callable[[Tensor], Tensor]:
    """The target's embedding, for a head without one."""
    if shape.size != target.capabilities.hidden:
        raise UserError(
            f"the head {files.source!r} has no embed_tokens.weight, and its width {shape.size} is not that of "
            f"{target.name} ({target.capabilities.hidden}), whose embedding it would read"
        )
    return target.embed


def _output(files: HeadFiles, shape: LayerShape, target: SlotBackend) -> tuple[Int[Tensor, " ids"] | None, Product]:
    """The tokens that a head drafts, and its output layer."""
    size, vocab = int(files.config.get("draft_vocab_size") or target.vocab_size), target.vocab_size
    ids, order = drafted_ids(files, size, vocab, target.device)
    own = files.optional("lm_head.weight", [size, shape.size])
    if own is None:
        if shape.size != target.capabilities.hidden:
            raise UserError(f"the head {files.source!r} has no lm_head.weight, and the target's has another width")
        return ids, Product(target.output_rows(torch.arange(vocab, device=target.device) if ids is None else ids))
    weight = cast(own, target)
    return ids, Product(weight if order is None else weight[order])


def eagle3_backend(source: str, target: SlotBackend) -> FollowingBackend:
    """An EAGLE-3 head over the target it was made for.

    Args:
        source: directory or hub id of the head.
        target: the target's backend.

    Raises:
        UserError: as `read_head` and `Eagle3Net`.
    """
    files = read_head(source)
    refuse_other_algorithm(files, "eagle3")
    net = Eagle3Net(files, target)
    files.refuse_left()
    return FollowingBackend(target, net, f"eagle3 head {source}", back=0)
