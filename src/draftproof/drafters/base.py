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
        limit: length of the longest chain that can be used this round; 0 for no draft.
        transforms: the request's sampling parameters, which also apply to the draft.
        session: the target's session of the request, for drafters that share the target's cache.
        prediction: tokens that the answer may repeat; empty without a prediction.
        cache_salt: what was read or written for a request is used for others with the same salt only.
        share_text: whether such requests may draft from its tokens, and it from theirs.
        budget: of the round, the same object for all its requests; asked before each token that is drawn.
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
        """Called once, with the sessions of requests that ended: new sessions may begin with these."""

    def read(self, parts: Sequence[DraftRequest]) -> None:
        """Read what a model will need of requests whose prompts are read in chunks.

        The target has read all `tokens` of each but the last one. Reading may also wait until something is drafted.
        """

    def ended(self, request_id: int, tokens: list[int]) -> None:
        """Called before `release` when a request ended without an error: its sessions may be kept."""


@runtime_checkable
class PreparedDrafter(Protocol):
    """A drafter that makes parts of itself while it is used; they can be made before."""

    def prepare(self, seconds: float) -> bool:
        """Make parts until the time is over, one step of one part at least; whether none is missing any more."""


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
        """Whether its drafts have no probabilities."""

    @property
    def constant(self) -> bool:
        """Whether drafts have one length, apart from requests' limits, and the same q after a text in every round."""

    @property
    def timed(self) -> bool:
        """Whether its drafts depend on the time of earlier rounds."""

    @property
    def reads_predictions(self) -> bool:
        """Whether it drafts from texts that are predicted for an answer."""

    @property
    def limit(self) -> int:
        """Depth of the deepest draft that it makes; 0 for none."""

    @property
    def max_positions(self) -> int | None:
        """Length of the longest sequence that it can draft for, in tokens; None when unbounded."""

    @property
    def stopper(self) -> Stopper | None:
        """What ends its drafts; None where it has no stopper."""

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """Return one draft for each request; a row without a draft gets an empty one."""

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Called after each round with the depth of the row's draft and the number of accepted tokens."""

    def spent(self, time: RoundTime) -> None:
        """Called after each round, after `observe`, with the time that it took."""

    def release(self, request_id: int) -> None:
        """Called when the request has ended; unknown ids are ignored."""


class TokenDrafter:
    """What drafters from tokens alone have in common: no model, no stopper, and nothing to learn from a round."""

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
