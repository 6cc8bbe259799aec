"""Tries: drafts that share prefixes, as index tables over rows of q and p, so that rules visit every node once.

Slot 0 of a trie is its root (the context before the draft), slot i + 1 is its node i. The draws at a slot are the
drafted tokens that were drawn in that context, in order; a slot without draws is a leaf. K i.i.d. chains, chains that
stopped early and prefix trees (SpecTr, arXiv 2310.15141, Algorithm 5) differ only in the table of draws.

The number of draws in a context may depend on everything that was drawn before them, and on nothing that was drawn
after them. Under that condition the rules on tries are lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.accelerator import to_device
from draftproof.functional.checks import check_chain, check_rows, check_tokens
from draftproof.rng import Rng
from draftproof.tree import ROOT, TokenTree, merge_chains

QRows = Float[Tensor, "rows V"] | None  # what `Tries.q_row` points into; None for point masses
PRows = Float[Tensor, "m V"]  # what `Tries.p_row` points into
Ends = tuple[Int[Tensor, " B"], Int[Tensor, " B"]]  # the last accepted slot and the bonus token of each row


class PathVerdict(NamedTuple):
    """The outcome of a rule on several chains per row.

    Attributes:
        path: index of a chain that begins with the accepted tokens (0 when nothing was accepted).
        accepted: number of accepted draft tokens.
        token: id of the bonus token.
    """

    path: Int[Tensor, " B"]
    accepted: Int[Tensor, " B"]
    token: Int[Tensor, " B"]


class NodeVerdict(NamedTuple):
    """The outcome of a rule on tries.

    Attributes:
        node: the last accepted node, an index into the row's own tree; ROOT (-1) when nothing was accepted.
        token: id of the bonus token.
    """

    node: Int[Tensor, " B"]
    token: Int[Tensor, " B"]


class DepthSlots(NamedTuple):
    """The slots of one depth that have draws; those with a single draw come first."""

    rows: Int[Tensor, " rows"]  # their flat ids (row of the batch * slots + slot)
    single: int  # number of slots with a single draw


@dataclass(frozen=True, eq=False)
class Tries:
    """The tries of a batch, padded to one size; every table is indexed by [row of the batch, slot].

    Attributes:
        tokens: token of each slot (meaningless for slot 0).
        parent: slot of the parent.
        depth: 0 for the root.
        kids: the slots of the drawn tokens, in order of drawing; 0 where a slot has fewer draws.
        q_row: the row of q that the slot's token was drawn from.
        p_row: the row of p after the slot.
        chain: a chain that passes through the slot (0 for trees).
        inner: for each depth, the slots with draws.
        slots: for each depth, the slots of that depth, padded with 0.
        branching: whether some slot has two different children.
    """

    tokens: Int[Tensor, "B N"]
    parent: Int[Tensor, "B N"]
    depth: Int[Tensor, "B N"]
    kids: Int[Tensor, "B N D"]
    q_row: Int[Tensor, "B N"]
    p_row: Int[Tensor, "B N"]
    chain: Int[Tensor, "B N"]
    inner: tuple[DepthSlots, ...]
    slots: tuple[Int[Tensor, "B _"], ...]
    branching: bool

    @classmethod
    def from_trees(cls, trees: Sequence[TokenTree], draws: Sequence[tuple[int, ...] | None]) -> Tries:
        """Tries of trees as the engine has them; nothing is copied from the device.

        Args:
            trees: one tree for each row of the batch. q has one row for each node, tree after tree. p has, tree after
                tree, one row for the root and then one for each node.
            draws: see `draftproof.draft.Draft.draws`.

        Raises:
            ValueError: an empty batch, or a node that is not among the draws.
        """
        if not trees:
            raise ValueError("trees: expected one or more, got no trees")
        order = [tuple(range(len(t))) if d is None else d for t, d in zip(trees, draws, strict=True)]
        starts = list(accumulate((len(tree) for tree in trees), initial=0))
        q_rows = [list(range(start, start + len(tree))) for start, tree in zip(starts, trees, strict=False)]
        p_rows = [
            list(range(start + row, start + row + len(tree) + 1))
            for row, (start, tree) in enumerate(zip(starts, trees, strict=False))
        ]
        tokens = torch.cat([tree.tokens for tree in trees])
        return _build([t.parents for t in trees], order, q_rows, p_rows, [[0] * len(t) for t in trees], tokens)

    @classmethod
    def from_chains(
        cls, tokens: Int[Tensor, "B K n"], lengths: Int[Tensor, "B K"] | None = None, *, once: bool = False
    ) -> Tries:
        """Tries of K chains per row, with equal prefixes merged; the tokens are copied to the host once.

        Args:
            tokens: drafted token ids. The rows of q are those of [B, K, n], the rows of p those of [B, K, n + 1].
            lengths: number of tokens in each chain when chains differ; entries beyond are padding.
            once: count each node as drawn once, also when several chains share it (draws without replacement).
        """
        _, k, n = tokens.shape
        chains: list[list[list[int]]] = tokens.tolist()
        if lengths is not None:
            sizes = lengths.tolist()
            chains = [[c[:m] for c, m in zip(row, size, strict=True)] for row, size in zip(chains, sizes, strict=True)]
        parents, draws, q_rows, p_rows, owners = [], [], [], [], []
        for row, group in enumerate(chains):
            _, parent, paths = merge_chains(group)
            place = {node: (j, i) for j in range(k - 1, -1, -1) for i, node in enumerate(paths[j])}
            found = [place[node] for node in range(len(parent))]
            parents.append(parent)
            draws.append(tuple(range(len(parent))) if once else tuple(node for path in paths for node in path))
            q_rows.append([(row * k + j) * n + i for j, i in found])
            p_rows.append([row * k * (n + 1)] + [(row * k + j) * (n + 1) + i + 1 for j, i in found])
            owners.append([j for j, _ in found])
        return _build(parents, draws, q_rows, p_rows, owners, tokens.flatten())

    @property
    def height(self) -> int:
        """Depth of the deepest slot."""
        return len(self.slots) - 1

    def draws_at(self, at: Int[Tensor, " B"]) -> tuple[Int[Tensor, "B D"], Int[Tensor, "B D"]]:
        """The slots of the tokens drawn at one slot of each row, and the tokens."""
        rows = torch.arange(at.shape[0], device=at.device)
        kids = self.kids[rows, at]
        return kids, self.tokens.gather(1, kids)

    def drawn_from(self, q: QRows, p: PRows, kids: Int[Tensor, " r"]) -> Float[Tensor, "r V"]:
        """The rows of q that the tokens of these flat slots were drawn from; q = None stands for point masses."""
        if q is not None:
            return q[self.q_row.flatten()[kids]]
        tokens = self.tokens.flatten()[kids].unsqueeze(-1)
        return torch.zeros(kids.shape[0], p.shape[-1], dtype=p.dtype, device=p.device).scatter_(-1, tokens, 1)

    def path_verdict(self, at: Int[Tensor, " B"], token: Int[Tensor, " B"]) -> PathVerdict:
        """The verdict as a number of tokens of a chain, from the last accepted slot and the bonus token of each row."""
        slot = at.unsqueeze(-1)
        return PathVerdict(self.chain.gather(1, slot).squeeze(-1), self.depth.gather(1, slot).squeeze(-1), token)

    def check(self, q: QRows, p: PRows) -> None:
        """Check that all rows are distributions over one vocabulary, and every token can come from its row of q."""
        check_rows("p", p)
        inside = self.depth > 0
        check_tokens(self.tokens, p.shape[-1], inside)
        if q is None or q.shape[0] == 0:
            return
        if q.shape[-1] != p.shape[-1]:
            raise ValueError(f"q: expected a column for each of the {p.shape[-1]} tokens of p, got {q.shape[-1]}")
        check_rows("q", q)
        bad = inside & (q[self.q_row * inside, self.tokens * inside] <= 0)
        if bad.any():
            row, slot = (int(i) for i in bad.nonzero()[0])
            raise ValueError(
                f"q of row {row}, node {slot - 1}: expected the distribution that its token was drawn from, got one "
                "that gives it probability 0"
            )


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths


def _draw_table(parents: Sequence[int], draws: Sequence[int]) -> list[list[int]]:
    """For each slot the slots of its draws, in order."""
    table: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node in draws:
        table[parents[node] + 1].append(node + 1)
    if len(set(draws)) != len(parents):
        missing = min(set(range(len(parents))) - set(draws))
        raise ValueError(f"draws: expected every node of the tree once or more, got none of node {missing}")
    return table


def _pad(rows: Sequence[Sequence[int]], device: torch.device) -> Int[Tensor, "B N"]:
    width = max(len(row) for row in rows)
    return to_device([[*row, *[0] * (width - len(row))] for row in rows], device, torch.int64)


def _levels(tables: list[list[list[int]]], depths: list[list[int]], device: torch.device) -> tuple[DepthSlots, ...]:
    """Slots with draws by depth; those with a single draw come first, because they need no search for a factor."""
    size = max(len(table) for table in tables)
    found: list[list[tuple[bool, int]]] = [[] for _ in range(max(map(max, depths)))]
    for row, (table, depth) in enumerate(zip(tables, depths, strict=True)):
        for slot, kids in enumerate(table):
            if kids:
                found[depth[slot]].append((len(kids) > 1, row * size + slot))
    return tuple(
        DepthSlots(to_device([at for _, at in sorted(level)], device, torch.int64), sum(not many for many, _ in level))
        for level in found
    )


def _build(
    parents: Sequence[Sequence[int]],
    draws: Sequence[Sequence[int]],
    q_rows: list[list[int]],
    p_rows: list[list[int]],
    owners: list[list[int]],
    tokens: Int[Tensor, " all"],
) -> Tries:
    device = tokens.device
    tables = [_draw_table(parent, order) for parent, order in zip(parents, draws, strict=True)]
    depths = [_depths(parent) for parent in parents]
    size, most = max(map(len, tables)), max(1, *(len(kids) for table in tables for kids in table))
    # All tries get the shape of the largest: no slot has the root as a child, so 0 means none.
    kids = [[k + [0] * (most - len(k)) for k in table] + [[0] * most] * (size - len(table)) for table in tables]
    at_depth = [
        [[slot for slot, d in enumerate(depth) if d == level] for depth in depths]
        for level in range(max(map(max, depths)) + 1)
    ]
    # The root has no token and no row of the draft: the first ones stand there, and nobody reads them.
    q_row = _pad([[0, *rows] for rows in q_rows], device)
    none = torch.zeros_like(q_row)
    return Tries(
        tokens=tokens[q_row] if tokens.shape[0] else none,
        parent=_pad([[0, *(at + 1 for at in parent)] for parent in parents], device),
        depth=_pad(depths, device),
        kids=to_device(kids, device, torch.int64),
        q_row=q_row,
        p_row=_pad(p_rows, device),
        chain=_pad([[0, *row] for row in owners], device),
        inner=_levels(tables, depths, device),
        slots=tuple(_pad(level, device) for level in at_depth),
        branching=any(len(set(k)) > 1 for table in tables for k in table),
    )


Rule = Callable[[Tries, QRows, PRows, Rng], Ends]
"""A rule on tries: it returns the last accepted slot and the bonus token of each row."""


def verify_tries(rule: Rule, tries: Tries, q: QRows, p: PRows, *, rng: Rng, validate: bool) -> NodeVerdict:
    """Check the inputs where `validate` is true, apply the rule, and return its verdict in terms of nodes."""
    if validate:
        tries.check(q, p)
    at, token = rule(tries, q, p, rng)
    return NodeVerdict(at + ROOT, token)


def verify_chains(
    rule: Rule,
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"] | None,
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, "B K"] | None,
    validate: bool,
    once: bool = False,
) -> PathVerdict:
    """Merge K chains per row into tries and apply the rule; `once` as for `Tries.from_chains`."""
    if validate:
        check_chain(tokens, q, p, lengths)
    tries = Tries.from_chains(tokens, lengths, once=once)
    return tries.path_verdict(*rule(tries, None if q is None else q.flatten(0, -2), p.flatten(0, -2), rng))


def refuse_branching_points(tries: Tries, q: QRows) -> None:
    """Refuse point masses that branch, for rules that need i.i.d. draws at a node."""
    if q is None and tries.branching:
        raise ValueError(
            "a point-mass draft branches: its tokens are no i.i.d. draws; use multi_round or traversal, or pass q"
        )
