"""Scheduling: admission of requests, prompt chunks, memory limits and prefix reuse.

Requests are admitted in order, as many as fit the batch and the memory. Prompts are read in chunks while interactive
requests are decoded, else at once. A common prefix is read only once (`backends.cache.prefix_cache`). If running
requests outgrow the memory, the newest one is preempted; later it continues where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Backend, Feed, common_prefix, unread
from draftproof.backends.cache.passes import PREFILL_CHUNK
from draftproof.backends.cache.prefix_cache import PrefixCache, room_for_sessions
from draftproof.drafters.base import DraftRequest, SessionDrafter
from draftproof.engine.chunked_prefill import ChunkSize
from draftproof.engine.memory import MemoryBudget, MemoryUse
from draftproof.engine.request import Request
from draftproof.tree import TokenTree

_HEADROOM = 64  # tokens that a request can grow by when it is admitted


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens of a prompt that a round reads; the end of the prompt is not among them."""

    row: Request
    tokens: list[int]
    scored: bool = False  # whether the logits after each token are needed: then they are read like drafted tokens

    def feed(self, device: torch.device) -> Feed:
        """The input of the target."""
        assert self.row.session is not None, "planned requests have a session"
        if self.scored and len(self.tokens) > 1:
            rest = torch.tensor(self.tokens[1:], device=device)
            return Feed(self.row.session, self.tokens[:1], TokenTree.chain(rest))
        return Feed(self.row.session, self.tokens)

    def end(self, logits: Float[Tensor, "rows vocab"]) -> None:
        """Pass the target's logits of a scored chunk to the request."""
        session = self.row.session
        assert session is not None, "planned requests have a session"
        unread(session, self.row.tokens)  # accepts what was read as drafted tokens
        self.row.score(logits, session.length - len(self.tokens))

    def draft_request(self) -> DraftRequest:
        """The drafter's view of the request after the target has read the chunk."""
        assert self.row.session is not None, "planned requests have a session"
        return replace(self.row.draft_request(1), tokens=self.row.tokens[: self.row.session.length + 1])


@dataclass(frozen=True)
class Plan:
    """The work of one round."""

    rows: list[Request] = field(default_factory=list)  # requests that get tokens; some read their whole prompt first
    chunks: list[PrefillChunk] = field(default_factory=list)  # parts of other prompts
    reads: int = 0  # prompt tokens of both
    has_interactive: bool = False  # whether an interactive request is being decoded
    decoded: int = 0  # how many of `rows` were being decoded before
    depth: int = 0  # mean number of tokens before a prompt token


class NoSessions:
    """Placeholder for a drafter without sessions."""

    backends: Sequence[Backend] = ()

    def reuse(self, kept: PrefixCache) -> None:
        """Does nothing."""

    def read(self, parts: Sequence[object]) -> None:
        """Does nothing."""

    def ended(self, request_id: int, tokens: list[int]) -> None:
        """Does nothing."""


def _depth(row: Request) -> int:
    """Number of tokens that a request's session has read."""
    return row.session.length if row.session is not None else 0


def _scored_chunk(row: Request, tokens: Sequence[int], room: int) -> PrefillChunk:
    """The next chunk of a prompt with requested log-probabilities; its end is read with the first draft."""
    return PrefillChunk(row, list(tokens[: min(room, len(tokens) - 1)]), scored=True)


class Scheduler:
    """The waiting and running requests of an engine, in the order of their arrival.

    Args:
        max_batch: returns how many requests may run together.
        spare: returns the most tokens that a request reads beyond its committed ones.
        kv_memory: bytes for keys, values and states; None for no limit.
    """

    def __init__(
        self,
        target: Backend,
        drafter: SessionDrafter,
        *,
        max_batch: Callable[[], int],
        spare: Callable[[], int],
        kv_memory: int | None,
        prefix_reuse: bool,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.chunk_size = ChunkSize()
        reuse = prefix_reuse and target.capabilities.resumes  # what is reused must not change an output
        self.prefix_cache = PrefixCache() if reuse else PrefixCache(0)  # sessions of requests that ended
        self.prefix_cache.most_nbytes = room_for_sessions(target.device) if kv_memory is None else kv_memory
        drafter.reuse(self.prefix_cache)
        self.budget = MemoryBudget(kv_memory, lambda: [target, *drafter.backends], spare)
        self._target = target
        self._drafter = drafter
        self._max_batch = max_batch
        self._turn = 0

    @property
    def use(self) -> MemoryUse:
        """Current memory use."""
        return MemoryUse(
            self.budget.needed(self._lengths()), self.prefix_cache.nbytes, self.budget.most, self.prefix_cache.reused
        )

    def _lengths(self) -> list[int]:
        return [len(row.tokens) for row in self.running]

    # --- admission --------------------------------------------------------------------------------------------------

    def admit(self) -> list[Request]:
        """Start waiting requests if there is room; returns requests that were preempted for lack of memory."""
        stopped = []
        while len(self.running) > 1 and not self._has_room(self._lengths()):
            stopped.append(self._stop_last())
        while self.waiting and len(self.running) < self._max_batch() and not stopped:
            request = self.waiting[0]
            if self.running and not self._has_room([*self._lengths(), len(request.tokens) + _HEADROOM]):
                break
            self.running.append(self.waiting.popleft())
        if self.running:
            self._has_room(self._lengths())
        return stopped

    def _has_room(self, lengths: Sequence[int]) -> bool:
        """Whether requests of these lengths fit; cached sessions are dropped if that makes them fit."""
        if self.budget.most is None:
            return True
        if not self.budget.fits(lengths):
            return False
        while not self.budget.fits(lengths, self.prefix_cache.nbytes):
            self.prefix_cache.drop()
        return True

    def _stop_last(self) -> Request:
        row = self.running.pop()
        self._close(row)
        row.reading = True
        self.waiting.appendleft(row)
        return row

    def end(self, row: Request, *, reusable: bool) -> None:
        """Remove a running request; if `reusable`, its session goes to the prefix cache."""
        self.running.remove(row)
        if reusable and row.session is not None:
            self._drafter.ended(row.id, row.tokens)
            self.prefix_cache.keep(self._target, row.session, row.tokens)
            row.session = None
        self._close(row)

    @staticmethod
    def _close(row: Request) -> None:
        if row.session is not None:
            row.session.close()
            row.session = None

    # --- rounds -----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The plan of the next round."""
        decoding = [row for row in self.running if not row.reading]
        if len(decoding) == len(self.running):
            return Plan(decoding, has_interactive=any(not row.offline for row in decoding), decoded=len(decoding))
        reading = [row for row in self.running if row.reading and not self._waits_for_another(row)]
        left = {row: self._unread_tokens(row) for row in reading}
        whole = not self._target.capabilities.portions
        if all(row.offline for row in decoding):  # nobody waits for a next token, so prompts need no chunks
            return self._at_once(decoding, left, whole=whole)
        turns = self._in_turns(left)
        size = self.chunk_size.size(len(decoding), len(self.running), _depth(turns[0]) if turns else 0)
        joined, parts, room = list(decoding), [], size
        for row in turns:
            tokens = left[row]
            # Without room one token of a prompt is still read: its request decodes from now on. A target that takes
            # no portions reads a whole prompt, but only as the first of a round.
            if row.unscored:
                if room:
                    parts.append(_scored_chunk(row, tokens, room))
            elif len(tokens) <= max(room, 1) or (whole and room == size > 0):
                joined.append(row)
            elif room and not whole:
                parts.append(PrefillChunk(row, tokens[:room]))
            room -= min(room, len(tokens))
        read = [(row, len(left[row])) for row in joined if row.reading]
        read += [(part.row, len(part.tokens)) for part in parts]
        reads = sum(tokens for _, tokens in read)
        depth = sum(_depth(row) * tokens for row, tokens in read) // max(reads, 1)
        return Plan(self._in_order(joined), parts, reads, has_interactive=True, decoded=len(decoding), depth=depth)

    def _at_once(self, decoding: list[Request], left: dict[Request, list[int]], *, whole: bool) -> Plan:
        """The plan without interactive requests: scored prompts, or a chunk of a long prompt, or all others at once."""
        parts: list[PrefillChunk] = []
        room = PREFILL_CHUNK
        for row in self._in_turns({row: tokens for row, tokens in left.items() if row.unscored}):
            if room and (not parts or self._target.capabilities.ragged):
                parts.append(_scored_chunk(row, left[row], room))
                room -= len(parts[-1].tokens)
        if parts:
            return Plan(chunks=parts, reads=PREFILL_CHUNK - room)
        short = [row for row, tokens in left.items() if whole or len(tokens) <= PREFILL_CHUNK]
        if len(short) < len(left) and (not short or decoding):
            row = next(row for row in self._in_turns(left) if row not in short)
            return Plan(chunks=[PrefillChunk(row, left[row][:PREFILL_CHUNK])], reads=PREFILL_CHUNK)
        return Plan(self._in_order([*decoding, *short]), reads=sum(len(left[row]) for row in short))

    def _in_order(self, rows: Sequence[Request]) -> list[Request]:
        return [row for row in self.running if row in rows]

    def _in_turns(self, left: dict[Request, list[int]]) -> list[Request]:
        """The prompts to read: oldest first in every second round, else shortest remainder first."""
        self._turn += 1
        return list(left) if self._turn % 2 else sorted(left, key=lambda row: len(left[row]))

    def _unread_tokens(self, row: Request) -> list[int]:
        """The tokens that a request must still read; opens its session first, with a cached prefix if there is one."""
        if row.session is None and row.unscored:
            row.session = self._target.open()
            row.session.cache_salt = row.cache_salt
        elif row.session is None:
            others = [each.session for each in self.running if each.session is not None]
            row.session = self.prefix_cache.open(self._target, row.tokens, others, row.cache_salt)
            row.reused = row.session.length
        return unread(row.session, row.tokens)

    def _waits_for_another(self, row: Request) -> bool:
        """Whether an older request is reading this one's prefix, which can be copied afterwards.

        A continuation also waits while another one collects the log-probabilities of their prompt.
        """
        if row.awaits_scores:
            return True
        if row.session is not None or row.unscored or not self.prefix_cache.most:
            return False
        for other in self.running[: self.running.index(row)]:
            if other.reading and other.cache_salt == row.cache_salt:
                shared = common_prefix(other.tokens, row.tokens[:-1])
                if shared >= max(self.prefix_cache.shortest, len(row.tokens) // 2) and self._will_reach(other, shared):
                    return True
        return False

    @staticmethod
    def _will_reach(other: Request, shared: int) -> bool:
        """Whether a reading request has not read this many tokens yet, but will keep a copyable session there."""
        if other.session is None:
            return True
        return other.session.reach(min(shared, other.session.stem)) < shared

    def record_time(self, plan: Plan, seconds: float, drafted: int, drafting: float) -> None:
        """Record a round: its seconds without drafting, the number of drafted tokens, and the seconds of drafting."""
        if plan.has_interactive:
            self.chunk_size.record_time(seconds, plan.reads, plan.decoded + drafted, drafting, plan.depth)
