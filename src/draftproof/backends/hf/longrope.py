"""Rotary angles with two sets of factors (longrope): one up to a length, another beyond it, each for all positions.

The row after n tokens is that of one pass over these n tokens: with short factors everywhere up to the length, with
long ones everywhere beyond it. So the keys of a text that grows past the length are all wrong at that moment, and the
text is read again with the other factors. That happens once in most texts, and again where drafts around the length are
refused. Transformers picks the factors by the largest position in a pass, other rows included, and a prompt is read in
portions here. So rows of one kind share passes, and passes that only have lower positions are told of a higher one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.backends.base import Feed, FeedOutput, Session
from draftproof.backends.cache.layout import feed_depths
from draftproof.backends.cache.passes import during
from draftproof.tree import TokenTree

Forward = Callable[[Sequence[Feed]], list[FeedOutput]]
LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class _Forced:
    """The factors of the passes that are computed at the moment."""

    length: int
    long: bool


_FORCED: ContextVar[_Forced | None] = ContextVar("_FORCED", default=None)


def _rotary(model: nn.Module) -> list[Any]:
    """Modules with two sets of factors."""
    kinds = [(module, getattr(module, "rope_type", None)) for module in model.modules()]
    return [module for module, kind in kinds if kind == "longrope"]


def switch_of(model: nn.Module) -> FactorSwitch | None:
    """The length past which a model takes other factors, as it is read at each pass; None for most models."""
    found = _rotary(model)
    if not found or not all(LENGTH in (getattr(each.config, "rope_parameters", None) or {}) for each in found):
        return None
    for module in found:
        if not hasattr(module, "follows_passes"):
            module.follows_passes = True
            module.register_forward_pre_hook(_show_length, with_kwargs=True)
            module.register_forward_hook(_hide_length)
    config = found[0].config
    return FactorSwitch(lambda: int(config.rope_parameters[LENGTH]))


def is_long() -> bool:
    """Whether the passes that are computed at the moment have the long factors."""
    forced = _FORCED.get()
    return forced is not None and forced.long


def _show_length(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:  # noqa: ARG001
    """One more column, of a position past the length; or positions that are all up to it."""
    forced = _FORCED.get()
    if forced is None:
        return None
    named = "position_ids" in options
    positions: Tensor = options["position_ids"] if named else args[1]
    if forced.long:
        positions = torch.cat([positions, torch.full_like(positions[:, :1], forced.length)], dim=1)
    else:
        positions = positions.clamp(max=forced.length - 1)
    return (args, {**options, "position_ids": positions}) if named else ((args[0], positions, *args[2:]), options)


def _hide_length(module: nn.Module, args: Any, made: tuple[Tensor, Tensor]) -> Any:  # noqa: ARG001
    return tuple(each[:, :-1] for each in made) if is_long() else None


class FactorSwitch:
    """The passes of a model with two sets of rotary factors.

    Args:
        length: tokens up to which the short factors hold, at the moment.
    """

    def __init__(self, length: Callable[[], int]) -> None:
        self._length = length

    @property
    def length(self) -> int:
        """Tokens up to which the short factors hold."""
        return self._length()

    def forward(self, feeds: Sequence[Feed], run: Forward, open_session: Callable[[], Session]) -> list[FeedOutput]:
        """Read every feed by `run` with the factors of its length, nodes past the length in a session of their own."""
        outputs: dict[int, FeedOutput] = {}
        kinds = [self._is_long(feed) for feed in feeds]
        deeper = [
            None if long else self._deeper(feed, run, open_session) for feed, long in zip(feeds, kinds, strict=True)
        ]
        for long in set(kinds):
            rows = [row for row, kind in enumerate(kinds) if kind is long]
            read = [self._again(feeds[row], long=long) for row in rows]
            with during(_FORCED, _Forced(self.length, long)):
                made = run([feed for feed, _ in read])
            for row, output, (_, count) in zip(rows, made, read, strict=True):
                outputs[row] = _last(output, count)
                _note(feeds[row].session, long=long)
        found = [outputs[row] for row in range(len(feeds))]
        return [each if more is None else _replaced(each, *more) for each, more in zip(found, deeper, strict=True)]

    def _is_long(self, feed: Feed) -> bool:
        """Whether the first row of a feed comes after more tokens than the length."""
        first = 0 if len(feed.tokens) else min(feed_depths(feed))
        return feed.session.stem + len(feed.tokens) + first > self.length

    def _again(self, feed: Feed, *, long: bool) -> tuple[Feed, int]:
        """The feed, together with all that its session has read with other factors; and how many rows are wanted."""
        session, wanted = feed.session, len(_rows(feed))
        if not session.length or _noted(session) == (long, session.length):
            return feed, wanted
        whole = _whole(feed, session)
        session.keep(0)
        _note(session, long=long)
        return whole, wanted

    def _deeper(
        self, feed: Feed, run: Forward, open_session: Callable[[], Session]
    ) -> tuple[list[int], FeedOutput] | None:
        """Rows of nodes past the length, below a first row that is not, and an output that is right there."""
        ends = _rows(feed)
        nodes = [row for row, end in enumerate(ends) if end > self.length]
        if not nodes:
            return None
        session = open_session()
        try:
            with during(_FORCED, _Forced(self.length, long=True)):
                output = run([_whole(feed, session)])[0]
        finally:
            session.close()
        return nodes, _last(output, len(ends))


def _rows(feed: Feed) -> list[int]:
    """Of each row that a feed gives, how many tokens it comes after."""
    stem = feed.session.stem + len(feed.tokens)
    return [*([stem] if len(feed.tokens) else []), *(stem + depth for depth in feed_depths(feed))]


def _whole(feed: Feed, session: Session) -> Feed:
    """All that a feed's session has read and the feed, as one feed of a session that is empty by then."""
    old = feed.session
    known, more = old.tokens[: old.stem], feed.tokens
    chain = [*known, *(more.tolist() if isinstance(more, Tensor) else more)]
    if feed.tree is None:
        return Feed(session, chain)
    above = torch.tensor(old.tokens[old.stem :], dtype=feed.tree.tokens.dtype, device=feed.tree.tokens.device)
    tree = TokenTree(torch.cat([above, feed.tree.tokens]), (*old.tail, *feed.tree.parents))
    return Feed(session, chain, tree)


def _last(output: FeedOutput, rows: int) -> FeedOutput:
    hidden = None if output.hidden is None else output.hidden[-rows:]
    return replace(output, logits=output.logits[-rows:], hidden=hidden)


def _replaced(output: FeedOutput, rows: list[int], other: FeedOutput) -> FeedOutput:
    logits, hidden = output.logits.clone(), output.hidden
    logits[rows] = other.logits[rows]
    if hidden is not None and other.hidden is not None:
        hidden = hidden.clone()
        hidden[rows] = other.hidden[rows]
    return replace(output, logits=logits, hidden=hidden)


_NOTE = "_rotary_factors"


def _note(session: Session, *, long: bool) -> None:
    """Remember with which factors a session has read, and how many slots."""
    setattr(session, _NOTE, (long, session.length))


def _noted(session: Session) -> tuple[bool, int] | None:
    """What was noted; None where something else has been read since, or the session belongs to nobody's passes."""
    noted: tuple[bool, int] | None = getattr(session, _NOTE, None)
    if noted is None or session.length > noted[1]:
        return None
    return noted[0], session.length
