"""What parts hand each other in a round: Draft (tokens with q), DraftStep (one token of it), Verdict (the outcome).

Knows: the shapes of the contracts. Does not know: who makes or uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
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
            landed on its children. K chains are their node paths one after another; a prefix tree (seed 002,
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

    def to(self, device: torch.device) -> Draft:
        """The draft with its tensors on a device, where a drafter made them elsewhere (n-gram drafts: on the host)."""
        if self.tree.tokens.device == device:
            return self
        probs = None if self.probs is None else self.probs.to(device)
        return replace(self, tree=replace(self.tree, tokens=self.tree.tokens.to(device)), probs=probs)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Draft:
        """Nothing drafted."""
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
    """One freshly drawn token of one row, shown to the stopper; it is submitted whatever the stopper says.

    Attributes:
        token: its id, a 0-dimensional tensor on the drafter's device.
        probs: q it was drawn from; None for a point mass.
        hidden: the draft model's last hidden state at the position that produced q, when the stopper asked for it.
        depth: how many tokens of this round's chain are drawn, this one included.
        row: the request's id, for stoppers that remember how its drafts fared.
    """

    token: Tensor
    probs: Float[Tensor, " vocab"] | None
    hidden: Float[Tensor, " dim"] | None
    depth: int
    row: int


__all__ = ["ROOT", "Draft", "DraftStep", "TokenTree", "Verdict"]
