"""DFlash 2 heads in the layout of `speculators`, and in that of their authors.

A DFlash head with two additions. Around attention and around the feed-forward part of each layer, a short convolution
mixes each place with those before it in its block; its weights are learned ones and a correction that the place's own
state makes. And of each place's tokens only the best are kept, and scored by how they follow the token before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding
from typing_extensions import override

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.published.dflash import DFlashNet, RowContext, last_tokens
from draftproof.backends.heads.published.files import HeadFiles, cast
from draftproof.backends.heads.published.layers import make_product
from draftproof.backends.heads.published.parallel import FeedRows
from draftproof.backends.lean.layers import Layer


class DFlash2Net(DFlashNet):
    """The network of a DFlash 2 head."""

    algorithm = "dflash2"
    conditional = True
    whole_windows = True
    fields = (*DFlashNet.fields, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        super().__init__(files, target)
        if self.ids is not None:
            raise files.refused("drafts a part of the vocabulary: dflash2 needs all of it")
        self._convolutions = {
            (part, number): _Convolution(files, f"layers.{number}.{part}_conv.", self.width, self.block.size, target)
            for number in range(len(self.block.layer_masks))
            for part in ("attention", "mlp")
        }
        rank = files.number("selector_rank")
        self._kept = files.number("selector_top_k")
        if self._kept > target.vocab_size:
            raise files.refused(
                f"has selector_top_k {self._kept}: expected 1 to {target.vocab_size}, the tokens of {target.name}"
            )
        table = [target.vocab_size, rank]
        self._before = cast(files.take("candidate_selector.predecessor_codebook", table), target)
        self._after = cast(files.take("candidate_selector.successor_codebook", table), target)
        self._project = make_product(files, "candidate_selector.hidden_projection", rank, self.width, target)

    def _layer(
        self, layer: Layer, given: Tensor, x: Tensor, block: Int[Tensor, " blocks"], at: Any, mask: Any
    ) -> Tensor:
        """One layer, with the convolutions around its two parts."""
        around = self._convolutions["attention", layer.number]
        mixed, weights = around.entering(layer.normed(x))
        fused = layer.project(given.index_copy(0, block, mixed))
        attended = layer.attention(layer.number, fused, at, mask).index_select(0, block)
        x = x + around.leaving(layer.out(attended), weights)
        around = self._convolutions["mlp", layer.number]
        assert layer.between is not None, "layers of heads have both norms"
        mixed, weights = around.entering(layer.between(x))
        return x + around.leaving(layer.down(layer.gated(layer.gate_up(mixed))), weights)

    @override
    def conditioned(self, rows: FeedRows, before: Sequence[RowContext]) -> FeedRows:
        """All others have logits of -inf."""
        scores, kept = rows.logits.topk(self._kept, -1)
        follows = embedding(last_tokens(before, rows.states.device), self._before) * self._project(rows.states)
        scores = scores + (follows.unsqueeze(1) * embedding(kept, self._after)).sum(-1)
        return rows._replace(logits=torch.full_like(rows.logits, float("-inf")).scatter_(-1, kept, scores))


class _Convolution:
    """Two convolutions over the places of a block, of what enters a part of a layer and of what leaves it."""

    def __init__(self, files: HeadFiles, at: str, width: int, block: int, target: SlotBackend) -> None:
        taps, size = files.number("conv_kernel_size"), files.number("conv_group_size")
        if taps > block or width % size:
            raise files.refused(
                f"has conv_kernel_size {taps} and conv_group_size {size}: expected at most "
                f"{block}, its block_size, and a divisor of {width}, its width"
            )
        self._shape = (block, width // size, size)
        self._taps = taps
        self._learned = cast(files.take(f"{at}base_kernel", [2, taps, width]), target).view(2, taps, *self._shape[1:])
        self._correct = make_product(files, f"{at}kernel_projection", 2 * taps * (width // size), width, target)

    def entering(self, x: Float[Tensor, "blocks dim"]) -> tuple[Float[Tensor, "blocks dim"], Tensor]:
        """What enters, mixed, and the corrections for `leaving`."""
        corrections = self._correct(x).view(-1, 2, self._taps, self._shape[1])
        return self._mixed(x, 0, corrections[:, 0]), corrections[:, 1]

    def leaving(self, x: Float[Tensor, "blocks dim"], corrections: Tensor) -> Float[Tensor, "blocks dim"]:
        """What leaves, mixed."""
        return self._mixed(x, 1, corrections)

    def _mixed(
        self, x: Float[Tensor, "blocks dim"], side: int, corrections: Float[Tensor, "blocks taps groups"]
    ) -> Float[Tensor, "blocks dim"]:
        places = x.view(-1, *self._shape)
        weights = self._learned[side] + corrections.unsqueeze(-1)
        weights = weights.view(-1, self._shape[0], *weights.shape[1:])
        made: Tensor = weights[:, :, 0] * places
        for tap in range(1, self._taps):
            made[:, tap:] += weights[:, tap:, tap] * places[:, :-tap]
        return made.view(x.shape)
