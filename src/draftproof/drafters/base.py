"""The contract of a drafter: what the engine gives it and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from draftproof.backends.base import Backend, Session
from draftproof.backends.cache.prefix_cache import PrefixCache
from draftproof.draft import Draft
from draftproof.rng import RoundRng
from draftproof.sampling import Transforms
from draftproof.stoppers.base import RoundTime, Stopper
from draftproof.stoppers.budget import UNLIMITED, DraftBudget


@dataclass(frozen=True)
class DraftRequest:
    """One row of the batch, as a drafter gets it.

    Attributes:
        id: identifies the request until it ends.
        tokens: prompt and committed tokens; a drafter must not change this list.
        prompt_length: number of prompt tokens.
        limit: length of the longest usable chain in this round; 0 for no draft.
        transforms: the request's sampling parameters, which also apply to the draft.
        session: the target's session of the request, for drafters that share the target's cache.
        prediction: tokens that the answer may repeat; empty without a prediction.
        cache_salt: cached data of a request is reused only by requests with the same salt.
        share_text: whether such requests may draft from its tokens, and it from theirs.
        budget: the draft budget of the round, shared by all its requests; asked before each token is drawn.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    limit: int
    transforms: Transforms
    session: Session | None = None
    prediction: Sequence[int] = ()
    cache_salt: str = ""
    share_text: bool = True
    budget: DraftBudget = UNLIMITED


@runtime_checkable
class SessionDrafter(Protocol):
    """A drafter whose models keep sessions for requests."""

    @property
    def backends(self) -> Sequence[Backend]:
        """The models."""

    def reuse(self, kept: PrefixCache) -> None:
        """Called once with the prefix cache, from which new sessions may start."""

    def read(self, parts: Sequence[DraftRequest]) -> None:
        """Read ahead for requests whose prompts are read in chunks.

        The target has read all `tokens` of each request but the last. A drafter may also read them later, when it
        drafts.
        """

    def ended(self, request_id: int, tokens: list[int]) -> None:
        """Called before `release` if a request ended without an error: its sessions may be kept for reuse."""


@runtime_checkable
class PreparedDrafter(Protocol):
    """A drafter that builds parts of itself during use; they can also be built in advance."""

    def prepare(self, seconds: float) -> bool:
        """Build parts until the time is over, but at least one step; returns whether everything is built."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for the rows of a batch."""

    @property
    def name(self) -> str:
        """The drafter's name in Python, on the command line and in reports."""

    @property
    def branching(self) -> bool:
        """Whether its drafts may branch."""

    @property
    def point_masses(self) -> bool:
        """Whether its drafts come without probabilities."""

    @property
    def constant(self) -> bool:
        """Whether all drafts have the same length (up to requests' limits), and the same q after the same text."""

    @property
    def timed(self) -> bool:
        """Whether its drafts depend on the time of earlier rounds."""

    @property
    def reads_predictions(self) -> bool:
        """Whether it drafts from a request's `prediction`."""

    @property
    def limit(self) -> int:
        """Depth of its deepest draft; 0 if it never drafts."""

    @property
    def max_positions(self) -> int | None:
        """Length of the longest sequence that it can draft for, in tokens; None if unbounded."""

    @property
    def stopper(self) -> Stopper | None:
        """The stopper that ends its drafts; None without one."""

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """Return one draft for each request, which may be empty."""

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Called after each round with the depth of the row's draft and the number of accepted tokens."""

    def spent(self, time: RoundTime) -> None:
        """Called after each round, after `observe`, with the time of the round."""

    def release(self, request_id: int) -> None:
        """Called when the request has ended; unknown ids are ignored."""


class TokenDrafter:
    """Base class of drafters that read tokens only: no model, no stopper, and nothing to learn from a round."""

    branching = False
    point_masses = True
    constant = False
    max_positions = None
    timed = False
    reads_predictions = False
    stopper = None

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Does nothing: drafts depend on committed tokens only."""

    def spent(self, time: RoundTime) -> None:
        """Does nothing."""

    def release(self, request_id: int) -> None:
        """Does nothing."""
