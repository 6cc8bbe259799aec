"""TokenTree: drafted tokens and the parent of each one; depths, paths and masks follow from the parents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

ROOT = -1


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Drafted tokens below the root (the last committed token); parents come before their children.

    Attributes:
        tokens: token id of each node, on the device where it was drawn.
        parents: index of each node's parent, ROOT (-1) for a child of the root.
        known: 0 for a whole tree. A draft model that reads a tree in several parts gets here the number of nodes before
            this part: `parents` counts those nodes too, and depths, paths and masks exist for whole trees only.
    """

    tokens: Int[Tensor, " nodes"]
    parents: tuple[int, ...]
    known: int = 0

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.shape[0] != len(self.parents):
            raise ValueError(
                f"parents: expected one for each token of a row of tokens, got {len(self.parents)} for tokens of shape "
                f"{tuple(self.tokens.shape)}"
            )
        for node, parent in enumerate(self.parents, start=self.known):
            if not ROOT <= parent < node:
                raise ValueError(f"parent of node {node}: expected {ROOT} (the root) to {node - 1}, got {parent}")

    @classmethod
    def chain(cls, tokens: Int[Tensor, " nodes"]) -> TokenTree:
        """A tree without branches: node i is the child of node i - 1."""
        return cls(tokens, tuple(range(ROOT, tokens.shape[0] - 1)))

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> TokenTree:
        """A tree without nodes: the round is a step of plain decoding."""
        return cls.chain(torch.empty(0, dtype=torch.int64, device=device))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node i is the child of node i - 1."""
        return not self.known and all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids on the host; the first use copies from the device."""
        return tuple(self.tokens.tolist())

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        assert not self.known, "a part of a tree has no depths of its own"
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes from the root's child down to the node itself."""
        assert not self.known, "a part of a tree has no paths of its own"
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((node,) if parent == ROOT else (*paths[parent], node))
        return tuple(paths)

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Children of each node, in node order; those of the root are under the key ROOT."""
        assert not self.known, "a part of a tree has no children of its own"
        found: dict[int, list[int]] = {node: [] for node in range(ROOT, len(self))}
        for node, parent in enumerate(self.parents):
            found[parent].append(node)
        return {node: tuple(kids) for node, kids in found.items()}

    @cached_property
    def visible(self) -> Bool[Tensor, "nodes nodes"]:
        """Attention mask among nodes: [i, j] is true where node j is on the path to node i, or is node i."""
        mask = torch.zeros(len(self), len(self), dtype=torch.bool)
        for node, path in enumerate(self.paths):
            mask[node, list(path)] = True
        return mask


def merge_chains(
    chains: Sequence[Sequence[int]],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Merge chains into a prefix trie: equal prefixes become one node.

    Returns:
        tokens and parents of the trie (in the order of the chains, parents before children), and each chain's path of
        nodes.
    """
    nodes: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[tuple[int, ...]] = []
    for chain in chains:
        at, path = ROOT, []
        for token in chain:
            node = nodes.setdefault((at, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(at)
            at = node
            path.append(node)
        paths.append(tuple(path))
    return tuple(tokens), tuple(parents), tuple(paths)
