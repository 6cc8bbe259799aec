"""What parts hand each other in a round: Draft (tokens with q), DraftStep (its newest tokens), Verdict (the outcome).

Knows: the shapes of the contracts. Does not know: who makes or uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.tree import ROOT, TokenTree


@dataclass(frozen=True, eq=False)
class Draft:
    """Drafted tokens and the distribution each was drawn from, in one object so that they cannot drift apart.

    Attributes:
        tree: the drafted tokens.
        probs: q of each node, the vector it was drawn from (float32 or float64); None when every node is a point mass.
        draws: the node each draw landed on, in the order of drawing, for drafts of several draws whose equal prefixes
            are merged: a node that was drawn m times stands there m times, and the draws at a node are those that
            landed on its children. K chains are their node paths one after another; a prefix tree (SpecTr,
            Algorithm 5) is its draws level by level. None: every node was drawn once, in node order.
    """

    tree: TokenTree
    probs: Float[Tensor, "nodes vocab"] | None
    draws: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.probs is not None and self.probs.shape[0] != len(self.tree):
            raise ValueError(f"a draft of {len(self.tree)} nodes came with {self.probs.shape[0]} rows of q")

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def depth(self) -> int:
        """Tokens on the longest path, the most that can be accepted."""
        return max(self.tree.depths, default=0)

    def to(self, device: torch.device) -> Draft:
        """The draft with its tensors on a device, where a drafter made them elsewhere (n-gram drafts: on the host)."""
        if self.tree.tokens.device == device:
            return self
        probs = None if self.probs is None else self.probs.to(device)
        return replace(self, tree=replace(self.tree, tokens=self.tree.tokens.to(device)), probs=probs)

    @classmethod
    @cache  # every round of plain decoding has one
    def empty(cls, device: torch.device | str = "cpu") -> Draft:
        """Nothing drafted; the same object for a device."""
        return cls(TokenTree.empty(device), None)


@dataclass(frozen=True)
class Verdict:
    """What a round emits.

    Attributes:
        path: accepted nodes from the root's child downwards.
        token: the bonus token that every round ends with.
        emitted: token ids of the path followed by the bonus token.
        state: what the rule wants to be given with the row's next draft; None for rules without memory.
    """

    path: tuple[int, ...]
    token: int
    emitted: tuple[int, ...]
    state: object = None


@dataclass(frozen=True, eq=False)
class DraftStep:
    """Freshly drawn tokens, one of each of several paths, shown to the stopper; they are submitted whatever it says.

    Attributes:
        tokens: their ids.
        probs: rows of q they were drawn from; None for point masses.
        hidden: the draft model's last hidden states at the positions that produced q (so at the tokens above the drawn
            ones), when the stopper reads them.
        logits: the draft model's own logits there, before any transform, when the stopper reads them.
    """

    tokens: Int[Tensor, " drawn"]
    probs: Float[Tensor, "drawn vocab"] | None
    hidden: Float[Tensor, "drawn dim"] | None
    logits: Float[Tensor, "drawn width"] | None = None


__all__ = ["ROOT", "Draft", "DraftStep", "TokenTree", "Verdict"]
