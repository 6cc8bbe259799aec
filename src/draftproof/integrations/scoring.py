"""Log-likelihoods of given texts: continuations of one context are one tree, so that the context is read once.

This is verification without a drafter: the continuations are the drafted nodes, and the rows of logits that would be
compared with a draft are summed up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Backend, Feed, Session, unread
from draftproof.errors import UserError
from draftproof.tree import TokenTree, merge_chains

_ROWS = 512  # rows of logits of a pass, whose memory the vocabulary multiplies


@dataclass(frozen=True)
class Score:
    """The likelihood of one continuation.

    Attributes:
        logprob: natural logarithm of its probability after the context.
        greedy: whether each of its tokens is the most likely one, ties to the lowest id.
    """

    logprob: float
    greedy: bool


@dataclass
class _Group:
    """A context, and each of its continuations once, with its places in the answer."""

    context: tuple[int, ...]
    tails: dict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def rows(self) -> int:
        """Rows of logits: one after the context, and one after every token but the last of a continuation."""
        return 1 + sum(len(tail) - 1 for tail in self.tails)


def score(
    backend: Backend, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, max_batch: int = 8
) -> Iterator[tuple[int, Score]]:
    """Score continuations of contexts, both as token ids.

    Args:
        backend: the model.
        pairs: context and continuation, each of one token or more, together at most one longer than the model reads.
        max_batch: contexts in a pass.

    Returns:
        The place of a pair and its score, as soon as it is there.

    Raises:
        UserError: an empty part, or a pair that is too long.
    """
    groups = _groups(backend, pairs)
    tall = [group for group in groups if group.rows > _ROWS or not backend.capabilities.trees]
    wide = [group for group in groups if group not in tall]
    for batch in _batches(wide, max_batch, ragged=backend.capabilities.ragged):
        yield from _trees(backend, batch)
    for group in tall:
        for tail, places in group.tails.items():
            found = _chain(backend, group.context, tail)
            yield from ((place, found) for place in places)


def _groups(backend: Backend, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[_Group]:
    found: dict[tuple[int, ...], _Group] = {}
    for place, (context, tail) in enumerate(pairs):
        if not context or not tail:
            raise UserError(f"pair {place}: expected 1 or more tokens in each half, got {len(context)} and {len(tail)}")
        most = backend.max_positions
        if most is not None and len(context) + len(tail) - 1 > most:
            raise UserError(
                f"pair {place}: expected at most {most + 1} tokens together ({backend.name} reads {most}), got "
                f"{len(context)} and {len(tail)}"
            )
        key = tuple(context)
        found.setdefault(key, _Group(key)).tails[tuple(tail)].append(place)
    return sorted(found.values(), key=lambda group: -len(group.context))


def _batches(groups: Sequence[_Group], most: int, *, ragged: bool) -> Iterator[list[_Group]]:
    """Groups of similar length together, as many as have few enough rows."""
    batch: list[_Group] = []
    for group in groups:
        full = len(batch) == (most if ragged else 1) or sum(each.rows for each in [*batch, group]) > _ROWS
        if batch and full:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def _trees(backend: Backend, groups: Sequence[_Group]) -> Iterator[tuple[int, Score]]:
    sessions: list[Session] = []
    try:
        feeds, rows_of = [], []
        for group in groups:
            sessions.append(backend.open())
            tree, rows = _tree(list(group.tails), backend.device)
            feeds.append(Feed(sessions[-1], list(group.context), tree))
            rows_of.append(rows)
        for group, rows, output in zip(groups, rows_of, backend.forward(feeds), strict=True):
            for (tail, places), own in zip(group.tails.items(), rows, strict=True):
                found = _sum(output.logits[own], tail)
                yield from ((place, found) for place in places)
    finally:
        for session in sessions:
            session.close()


def _tree(tails: Sequence[tuple[int, ...]], device: torch.device) -> tuple[TokenTree | None, list[list[int]]]:
    """A tree of all tokens but the last ones, common beginnings once, and the rows of logits before each token."""
    tokens, parents, paths = merge_chains([tail[:-1] for tail in tails])
    tree = TokenTree(torch.tensor(tokens, device=device), parents) if tokens else None
    return tree, [[0, *[node + 1 for node in path]] for path in paths]


def _chain(backend: Backend, context: Sequence[int], tail: Sequence[int]) -> Score:
    session, nodes = backend.open(), list(tail[:-1])
    parts = []
    try:
        for start in range(0, max(len(nodes), 1), _ROWS):
            piece = nodes[start : start + _ROWS]
            tree = TokenTree.chain(torch.tensor(piece, device=backend.device)) if piece else None
            pending = unread(session, [*context, *nodes[:start]])
            logits = backend.forward([Feed(session, pending, tree)])[0].logits
            last = start + len(piece) == len(nodes)
            rows = logits if last else logits[:-1]  # the next piece begins with the last row
            parts.append(_sum(rows, tail[start : start + rows.shape[0]]))
    finally:
        session.close()
    return Score(sum(part.logprob for part in parts), all(part.greedy for part in parts))


@torch.inference_mode()
def _sum(logits: Float[Tensor, "tokens vocab"], tail: Sequence[int]) -> Score:
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    ids = torch.tensor(list(tail), device=rows.device)
    each = rows.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return Score(float(each.sum()), bool((logits.argmax(-1) == ids).all()))
