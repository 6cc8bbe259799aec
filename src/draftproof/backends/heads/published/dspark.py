"""DSpark heads in the layout of `speculators`, and in that of their authors (DeepSpec).

A DFlash head whose rows are corrected, token by token, by a small product of the token before: its embedding of a few
numbers, as it is, gated by the place's state, or through a recurrent state of the draft. A further head predicts from
the same things whether the next token will be accepted, before that token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import embedding, linear
from typing_extensions import override

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.published.dflash import DFlashNet, RowContext, last_tokens
from draftproof.backends.heads.published.files import HeadFiles, cast
from draftproof.backends.heads.published.layers import make_product
from draftproof.backends.heads.published.parallel import FeedRows
from draftproof.backends.products.packed_linear import PackedLinear

_VANILLA, _GATED, _RECURRENT = KINDS = ("vanilla", "gated", "rnn")


class DSparkNet(DFlashNet):
    """The network of a DSpark head."""

    algorithm = "dspark"
    conditional = True
    from_anchor = True
    fields = (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "projector_type",
        "logit_scale",
        "sample_from_anchor",
        "dspark_bonus_anchor",
    )

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        super().__init__(files, target)
        self._scale = files.factor("logit_scale") or 1.0
        drafted = target.vocab_size if self.ids is None else len(self.ids)
        self._markov = MarkovHead.of(files, target, self.width, drafted, self._order, whole=not self.block.first)
        self._confidence: tuple[Tensor, Tensor] | None = None
        self._reads_token = False
        if (weight := files.optional("confidence_head.proj.weight", [1, None])) is not None:
            self._reads_token = weight.shape[1] > self.width
            legal = self.width + (self._markov.rank if self._markov is not None and self._reads_token else 0)
            if weight.shape[1] != legal:
                raise files.refused(
                    f"has a confidence head that reads {weight.shape[1]} numbers: expected "
                    f"{self.width}, its width, and as many more as markov_rank says"
                )
            bias = files.take("confidence_head.proj.bias", [1])
            self._confidence = (cast(weight, target).float(), cast(bias, target).float())
        self.predicts = self._confidence is not None

    @classmethod
    @override
    def starts_at_anchor(cls, files: HeadFiles) -> bool:
        """From both layouts' fields; vLLM's says that the anchor's place does not draft."""
        said, apart = files.field("sample_from_anchor"), files.field("dspark_bonus_anchor")
        if None not in (said, apart) and bool(said) == bool(apart):
            raise files.refused(
                f"has sample_from_anchor {said} and dspark_bonus_anchor {apart}: expected one of them true, not both"
            )
        return not apart if said is None else bool(said)

    @override
    def conditioned(self, rows: FeedRows, before: Sequence[RowContext]) -> FeedRows:
        logits, states, accepted = rows
        features = states
        if self._markov is not None:
            tokens = self._markov.embedded(last_tokens(before, states.device))
            logits = logits + self._markov(states, tokens, before)
            features = torch.cat([states, tokens], -1) if self._reads_token else states
        if self._scale != 1.0:  # as vLLM reads it: of the block's rows and of their corrections
            logits = logits * self._scale
        if self._confidence is not None:
            accepted = linear(features.float(), *self._confidence).sigmoid().squeeze(-1)
        return FeedRows(logits, states, accepted)


class MarkovHead:
    """What the token before adds to a row of logits.

    Args:
        first: a row of numbers for each token of the target.
        last: from these to logits.
        mixed: of the gate or of the recurrent state; None for kind vanilla.
    """

    def __init__(
        self, kind: str, first: Float[Tensor, "vocab rank"], last: PackedLinear, mixed: PackedLinear | None
    ) -> None:
        self._kind = kind
        self._first = first
        self._last = last
        self._mixed = mixed
        self.rank = first.shape[-1]  # how many numbers a token has

    @classmethod
    def of(
        cls, files: HeadFiles, target: SlotBackend, width: int, drafted: int, order: Tensor | None, *, whole: bool
    ) -> MarkovHead | None:
        """From a head's files; None for a head without one.

        `order` is that of the tokens that it drafts, None where it is the files'. `whole` says whether all places of a
        block draft.
        """
        if files.field("markov_rank") == 0:
            return None
        rank, kind = files.number("markov_rank"), files.field("markov_head_type", _VANILLA)
        if kind not in KINDS:
            raise files.refused(f"has markov_head_type {kind!r}: expected {', '.join(KINDS)}")
        if kind == _RECURRENT and not whole:
            raise files.refused(
                f"has markov_head_type {kind!r} and a first place that does not draft: "
                "expected sample_from_anchor true with it"
            )
        first = cast(files.take("markov_head.markov_w1.weight", [target.vocab_size, rank]), target)
        last = cast(files.take("markov_head.markov_w2.weight", [drafted, rank]), target)
        mixed = None
        if kind == _GATED:
            mixed = make_product(files, "markov_head.gate_proj", rank, width + rank, target)
        elif kind == _RECURRENT:
            mixed = make_product(files, "markov_head.joint_proj", 3 * rank, width + 2 * rank, target)
        return cls(kind, first, PackedLinear(last if order is None else last[order]), mixed)

    def embedded(self, tokens: Tensor) -> Float[Tensor, "*tokens rank"]:
        """The numbers of tokens."""
        return embedding(tokens, self._first)

    def __call__(
        self, states: Float[Tensor, "rows dim"], tokens: Float[Tensor, "rows rank"], before: Sequence[RowContext]
    ) -> Float[Tensor, "rows ids"]:
        """What is added to logits."""
        if self._mixed is None:
            return self._last(tokens)
        if self._kind == _GATED:
            return self._last(self._mixed(torch.cat([states, tokens], -1)).sigmoid() * tokens)
        return self._last(torch.stack([self._recurrent(*each) for each in before]))

    def _recurrent(self, path: Sequence[int], states: Float[Tensor, "places dim"]) -> Float[Tensor, " rank"]:
        """The output of the recurrent state after the tokens of a path, one at each place."""
        assert self._mixed is not None, "checked before"
        tokens = self.embedded(torch.tensor(path, device=states.device))
        state = out = tokens.new_zeros(self.rank)
        for token, place in zip(tokens, states, strict=False):  # no more places than tokens
            gate, new, out = self._mixed(torch.cat([state, token, place]).unsqueeze(0)).squeeze(0).chunk(3)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * new.tanh()
        return out.tanh()
