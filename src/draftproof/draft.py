"""The data of a round: Draft (tokens with q), DraftStep (the newest tokens, for a stopper), Verdict (the outcome)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.tree import ROOT, TokenTree


class Origin(StrEnum):
    """Where drafted tokens come from."""

    DRAFTER = "drafter"
    GRAMMAR = "grammar"
    LOOKUP = "lookup"
    PREDICTION = "prediction"


@dataclass(frozen=True, eq=False)
class Draft:
    """Drafted tokens, each with the distribution it was drawn from.

    Attributes:
        tree: the drafted tokens.
        probs: q of each node, the row it was drawn from (float32 or float64); None when every node is a point mass.
        draws: the node of each draw, in order of drawing. Equal prefixes are merged, so a node that was drawn m times
            is listed m times; the draws at a node are the entries for its children. For K chains this is their paths of
            nodes one after another; for a prefix tree (SpecTr, arXiv 2310.15141, Algorithm 5) the draws level by level.
            None: every node was drawn once, in the order of the nodes.
        origin: where the tokens come from.
        certain_from: the first node of a chain from which on every token is a function of those before it, though it
            has a row of q; None for none of a draft with `probs`, and for all of one without.
    """

    tree: TokenTree
    probs: Float[Tensor, "nodes vocab"] | None
    draws: tuple[int, ...] | None = None
    origin: Origin = Origin.DRAFTER
    certain_from: int | None = None

    def __post_init__(self) -> None:
        if self.probs is not None and self.probs.shape[0] != len(self.tree):
            raise ValueError(
                f"a draft of {len(self.tree)} nodes has {self.probs.shape[0]} rows of q: one each is legal"
            )

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path, which is the most that can be accepted."""
        return max(self.tree.depths, default=0)

    @property
    def drawn(self) -> int:
        """Number of nodes that were drawn; the others of a chain are functions of the tokens before them."""
        if self.certain_from is not None:
            return self.certain_from
        return 0 if self.probs is None and self.draws is None else len(self)

    def to(self, device: torch.device) -> Draft:
        """The draft with its tensors on this device (n-gram drafts, for example, are made on the host)."""
        if self.tree.tokens.device == device:
            return self
        if not len(self):
            return Draft.empty(device)
        probs = None if self.probs is None else self.probs.to(device)
        return replace(self, tree=replace(self.tree, tokens=self.tree.tokens.to(device)), probs=probs)

    def first(self, size: int) -> Draft:
        """The first tokens of a chain."""
        if not size:
            return Draft.empty(self.tree.tokens.device)
        probs = None if self.probs is None else self.probs[:size]
        return replace(self, tree=TokenTree.chain(self.tree.tokens[:size]), probs=probs)

    @classmethod
    @cache  # every round of plain decoding needs one
    def empty(cls, device: torch.device | str = "cpu") -> Draft:
        """A draft without tokens; every call with the same device returns the same object."""
        return cls(TokenTree.empty(device), None)


@dataclass(frozen=True)
class Verdict:
    """What a round emits.

    Attributes:
        path: the accepted nodes, from the root's child down.
        token: id of the bonus token that every round ends with.
        emitted: token ids of the path followed by the bonus token.
        state: the rule's state, passed to `Verifier.verify` with the row's next draft; None for rules without state.
    """

    path: tuple[int, ...]
    token: int
    emitted: tuple[int, ...]
    state: object = None


@dataclass(frozen=True, eq=False)
class DraftStep:
    """The newest token of each of several paths, for the stopper; these tokens are verified in any case.

    Attributes:
        tokens: token ids.
        probs: rows of q that the tokens were drawn from; None for point masses.
        hidden: last hidden states of the draft model at the positions that produced q, one token before the drawn
            ones; None unless the stopper reads them.
        logits: logits of the draft model at the same positions, before any transform; None unless the stopper reads
            them.
    """

    tokens: Int[Tensor, " drawn"]
    probs: Float[Tensor, "drawn vocab"] | None
    hidden: Float[Tensor, "drawn dim"] | None
    logits: Float[Tensor, "drawn width"] | None = None


__all__ = ["ROOT", "Draft", "DraftStep", "Origin", "TokenTree", "Verdict"]
