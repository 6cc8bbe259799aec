"""What networks of published heads share: a base class, and what a head takes from its target.

Taken are hidden states, and the embedding and output rows that the head lacks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import HeadBackend, LayeredNet
from draftproof.backends.heads.published.files import HeadFiles, cast, drafted_ids, read_head
from draftproof.backends.heads.published.layers import LayerShape
from draftproof.backends.heads.published.rounding import drafting_output, rounded_product
from draftproof.backends.lean.layers import Embedding
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.errors import UserError


class PublishedNet(LayeredNet):
    """The network of a published head."""

    algorithm: ClassVar[str]

    @abstractmethod
    def __init__(self, files: HeadFiles, target: SlotBackend) -> None: ...

    @classmethod
    def load(cls, source: str, target: SlotBackend) -> HeadBackend:
        """A head over the target it was made for."""
        files = read_head(source, cls.algorithm)
        net = cls(files, target)
        files.refuse_left()
        return HeadBackend(target, net, f"{cls.algorithm} head {source}", back=0)


def states_of(files: HeadFiles, named: Any, target: SlotBackend) -> tuple[int, ...]:
    """The layers of the target whose states a head reads: 0 before the first layer, i after layer i.

    `named` is what its config says; None stands for a low, a middle and a high layer.
    """
    total = target.facts.layers
    found = [2, total // 2, total - 3] if named is None else named
    sane = isinstance(found, list) and all(isinstance(each, int) and 0 <= each <= total for each in found)
    if not found or not sane or len(set(found)) < len(found):
        said = "without a list of layers" if named is None else f"whose layers are {named}"
        raise UserError(
            f"the head {files.source!r}, {said}, cannot read the hidden states of {target.name}, which has {total} "
            f"layers: expected different numbers from 0 to {total}; take a head that was made for this target"
        )
    return tuple(found)


def vocabulary_of(files: HeadFiles, shape: LayerShape) -> int:
    """The size of the target's vocabulary that a head was made for."""
    mask = files.tensors.get("t2d")
    return shape.vocab if mask is None else mask.shape[0]


def embedding_of(files: HeadFiles, shape: LayerShape, target: SlotBackend) -> Callable[[Tensor], Tensor]:
    """A head's own embedding, or the target's for a head without one."""
    own = files.optional("embed_tokens.weight", [target.vocab_size, shape.size])
    if own is not None:
        return Embedding(cast(own, target))
    if shape.size != target.capabilities.hidden:
        raise files.refused(
            f"has no embed_tokens.weight, and its width {shape.size} is not that of "
            f"{target.name} ({target.capabilities.hidden}), whose embedding it would read"
        )
    return target.embed


def factor_of(embed: Callable[[Tensor], Tensor]) -> float:
    """By what an embedding multiplies its rows, as Gemma's does; 1 for most."""
    return float(embed.factor if isinstance(embed, Embedding) else getattr(embed, "scalar_embed_scale", 1.0))


class DraftVocabulary(NamedTuple):
    """Which tokens a head drafts, and with which output layer."""

    ids: Int[Tensor, " ids"] | None  # the tokens, ascending; None for all
    order: Int[Tensor, " ids"] | None  # of the rows in the files, for that; None where it is theirs
    product: PackedLinear  # the output layer


def output_of(files: HeadFiles, shape: LayerShape, target: SlotBackend) -> DraftVocabulary:
    """The tokens that a head drafts, and its output layer or rows of the target's."""
    size, vocab = int(files.config.get("draft_vocab_size") or target.vocab_size), target.vocab_size
    ids, order = drafted_ids(files, size, vocab, target.device)
    own = files.optional("lm_head.weight", [size, shape.size])
    if own is None:
        if shape.size != target.capabilities.hidden:
            raise files.refused("has no lm_head.weight, and the target's has another width")
        rows = target.output_rows(torch.arange(vocab, device=target.device) if ids is None else ids)
        return DraftVocabulary(ids, order, drafting_output(rows))
    weight = cast(own, target)
    return DraftVocabulary(
        ids, order, rounded_product(PackedLinear(weight if order is None else weight[order]), output=True)
    )
