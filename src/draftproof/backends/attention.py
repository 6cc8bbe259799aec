"""The attention of a lean layer: rotary embedding, writes to the slot cache and attention, by torch or `native`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Bool, Float
from torch import Tensor

from draftproof.backends.layout import Layout, additive
from draftproof.backends.slot_cache import WritePlan
from draftproof.kernels import native
from draftproof.kernels.operations import AttentionArguments, Operations, PassMask

_FOLDED = 128  # passes up to this width fold the query heads of a key head, and their mask, into rows


@dataclass(frozen=True)
class Heads:
    """Number and size of a layer's heads.

    Attributes:
        queries, keys: number of heads; each key head serves `group` neighbouring query heads.
        dim: of each head.
        scale: factor of the scores.
    """

    queries: int
    keys: int
    dim: int
    scale: float

    @property
    def group(self) -> int:
        """Number of query heads for each key head."""
        return self.queries // self.keys


@dataclass(frozen=True, eq=False)
class Pass:
    """The inputs that all layers of one forward pass share.

    Attributes:
        rows, width: of the padded feeds; hidden states are [rows * width, dim].
        cos, sin: rotary angles, [rows * width, 1, dim]; sin with the sign of `rotate_half`.
        cache, plan: where keys and values are written: a slot cache, or what has its `write` and needs no plan.
    """

    rows: int
    width: int
    cos: Tensor
    sin: Tensor
    cache: Any
    plan: WritePlan | None


@runtime_checkable
class Attention(Protocol):
    """An implementation of attention."""

    def mask(self, layout: Layout, window: int | None, dtype: torch.dtype) -> Any:
        """The mask of all layers with the same window, in the form that `__call__` takes."""
        ...

    def masked(self, layout: Layout, allowed: Bool[Tensor, "tokens horizon"], dtype: torch.dtype) -> Any:
        """The mask where each token, in the order of padded rows, may read the slots that are true, at least one."""
        ...

    def __call__(
        self, layer: int, fused: Float[Tensor, "tokens heads dim"], at: Pass, mask: Any
    ) -> Float[Tensor, "tokens inner"]:
        """The outputs of all heads, concatenated.

        Args:
            layer: its number in the cache, where the new keys and values are written.
            fused: queries, keys and values of every token; may be overwritten.
            at: the pass.
            mask: returned by `mask`.
        """
        ...


def attention(heads: Heads, like: Tensor, *, pack: bool) -> Attention:
    """The fastest available implementation.

    Args:
        heads: of the layer.
        like: a weight, for its dtype and device.
        pack: whether an implementation that needs a memory layout for the CPU may be chosen.
    """
    operations = native.operations(like) if pack else None
    if operations is not None and operations.attends(heads.dim):
        return NativeAttention(heads, operations)
    return TorchAttention(heads)


class TorchAttention:
    """Attention by torch's operations.

    Args:
        heads: of the layer.
    """

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def mask(self, layout: Layout, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """An additive mask, each row repeated for the query heads of a key head; None where every slot is seen."""
        return None if sees_all(layout, window) else self._folded(layout.mask(window, dtype))

    def masked(self, layout: Layout, allowed: Bool[Tensor, "tokens horizon"], dtype: torch.dtype) -> Tensor:
        """See `Attention`."""
        return self._folded(additive(allowed, dtype).view(len(layout.feeds), 1, layout.width, -1))

    def _folded(self, mask: Float[Tensor, "rows 1 width horizon"]) -> Tensor:
        return mask if mask.shape[2] > _FOLDED else mask.repeat_interleave(self.heads.group, 2)

    def __call__(
        self, layer: int, fused: Float[Tensor, "tokens heads dim"], at: Pass, mask: Tensor | None
    ) -> Float[Tensor, "tokens inner"]:
        """See `Attention`."""
        heads = self.heads
        turned = fused.narrow(1, 0, heads.queries + heads.keys)
        turned = torch.addcmul(turned * at.cos, turned.roll(heads.dim // 2, -1), at.sin)
        grid = (at.rows, at.width, heads.keys, heads.dim)
        keys, values = at.cache.write(
            layer,
            at.plan,
            turned.narrow(1, heads.queries, heads.keys).view(grid).transpose(1, 2),
            fused.narrow(1, heads.queries + heads.keys, heads.keys).view(grid).transpose(1, 2),
        )
        return self._attend(turned.narrow(1, 0, heads.queries), keys, values, at, mask)

    def _attend(
        self,
        queries: Float[Tensor, "tokens heads dim"],
        keys: Float[Tensor, "rows key_heads horizon dim"],
        values: Float[Tensor, "rows key_heads horizon dim"],
        at: Pass,
        mask: Tensor | None,
    ) -> Float[Tensor, "tokens inner"]:
        """Attention; the query heads of one key head are rows of one product, so that keys are read once."""
        heads = self.heads
        if at.width > _FOLDED:  # a folded mask would be large, and little time would be saved
            wide = queries.view(at.rows, at.width, heads.queries, heads.dim).transpose(1, 2)
            made = F.scaled_dot_product_attention(
                wide, keys, values, attn_mask=mask, scale=heads.scale, enable_gqa=True
            )
            return made.transpose(1, 2).reshape(queries.shape[0], -1)
        split = (at.rows, at.width, heads.keys, heads.group, heads.dim)
        folded = queries.view(split).transpose(1, 2).reshape(at.rows, heads.keys, -1, heads.dim)
        made = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=heads.scale)
        made = made.view(at.rows, heads.keys, at.width, heads.group, heads.dim).transpose(1, 2)
        return made.reshape(queries.shape[0], -1)


def sees_all(layout: Layout, window: int | None) -> bool:
    """Whether each row's only new token sees every slot that is read."""
    plan = layout.plan
    alone = layout.width == 1 and plan.aligned and (window is None or plan.horizon <= window)
    return alone and not any(feed.session.tail for feed in layout.feeds)


class NativeAttention:
    """Attention by `native`: no mask for chains, padding is not read, each row is read up to its own length.

    Args:
        heads: of the layer.
        operations: of this machine.
    """

    def __init__(self, heads: Heads, operations: Operations) -> None:
        self.heads = heads
        self.operations = operations

    def mask(self, layout: Layout, window: int | None, dtype: torch.dtype) -> PassMask:
        """The number of leading slots that each token may read, and a mask over them where that is not enough."""
        plan = layout.plan
        places = list(zip(plan.slots, plan.bases, plan.widths, strict=True))
        if layout.straight and (window is None or plan.horizon <= window):
            return PassMask(places, [[last + 1 for last in row] for row in layout.host_limits], None)
        return PassMask(places, self._every(layout), layout.mask(window, dtype))

    def masked(self, layout: Layout, allowed: Bool[Tensor, "tokens horizon"], dtype: torch.dtype) -> PassMask:
        """See `Attention`."""
        plan = layout.plan
        places = list(zip(plan.slots, plan.bases, plan.widths, strict=True))
        return PassMask(places, self._every(layout), additive(allowed, dtype))

    @staticmethod
    def _every(layout: Layout) -> list[list[int]]:
        """For each token, how many slots its row has after this pass."""
        return [[end] * size for end, size in zip(layout.plan.ends, layout.sizes, strict=True)]

    def __call__(
        self, layer: int, fused: Float[Tensor, "tokens heads dim"], at: Pass, mask: PassMask
    ) -> Float[Tensor, "tokens inner"]:
        """See `Attention`."""
        heads = self.heads
        keys, values = at.cache.buffers(layer, heads.keys, heads.dim, fused)
        given = AttentionArguments.of(at.cos, at.sin, keys.shape, mask, heads=heads.queries, scale=heads.scale)
        return self.operations.attend(fused, given, keys, values)
