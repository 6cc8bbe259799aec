"""Statistics of a request: counts, rates and the time of each part."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

PARTS = ("draft", "target", "verify")
COUNTS = (
    "num_tokens",
    "num_target_calls",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_prediction_tokens",
    "num_first_tokens",
    "seconds_to_first",
)
RATES = ("block_efficiency", "discard_rate", "verification_rate", "tokens_per_second")


@dataclass
class Seconds:
    """Wall-clock seconds by part; each request of a batch is charged the whole round, because it waits for it."""

    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """Seconds outside these parts: bookkeeping, detokenizing, streaming."""
        return max(self.total - self.draft - self.target - self.verify, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time spent inside to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)

    def add(self, other: Seconds) -> None:
        """Add the seconds of another object to these."""
        for part in (*PARTS, "total"):
            setattr(self, part, getattr(self, part) + getattr(other, part))

    def to_dict(self) -> dict[str, float]:
        """All parts, including `other`."""
        return {part: getattr(self, part) for part in (*PARTS, "other", "total")}


@dataclass
class Stats:
    """Counts of one request (or of several, added up); names as in vLLM's metrics.

    Attributes:
        num_tokens: tokens emitted.
        num_target_calls: forward passes of the target, including prefill.
        num_drafts: rounds that verified at least one drafted token.
        num_draft_tokens: tokens drafted.
        num_accepted_tokens: drafted tokens that were emitted.
        num_accepted_tokens_per_pos: accepted tokens at each position of the draft.
        num_drafts_per_pos: rounds whose draft reached each position, accepted or not.
        num_accepted_prediction_tokens: accepted tokens that were drafted from a predicted text.
        num_first_tokens: tokens emitted by the first round, which also reads the end of the prompt.
        seconds_to_first: seconds until that round ended, without the time in the queue.
        seconds: time by part.
    """

    num_tokens: int = 0
    num_target_calls: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafts_per_pos: list[int] = field(default_factory=list)
    num_accepted_prediction_tokens: int = 0
    num_first_tokens: int = 0
    seconds_to_first: float = 0.0
    seconds: Seconds = field(default_factory=Seconds)

    def record(self, *, drafted: int, depth: int, accepted: int, emitted: int) -> None:
        """Add one round: drafted nodes, their largest depth, accepted nodes that were emitted, emitted tokens."""
        self.num_tokens += emitted
        self.num_target_calls += 1
        self.num_drafts += drafted > 0
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for reached, places in ((self.num_accepted_tokens_per_pos, accepted), (self.num_drafts_per_pos, depth)):
            reached.extend([0] * (depth - len(reached)))
            for place in range(places):
                reached[place] += 1

    def add_time(self, seconds: Seconds) -> None:
        """Add the time of a round, after its counts."""
        self.seconds.add(seconds)
        if self.num_tokens and not self.num_first_tokens:
            self.num_first_tokens = self.num_tokens
            self.seconds_to_first = self.seconds.total

    def add(self, other: Stats) -> None:
        """Add the counts and times of another request to these."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("num_accepted_tokens_per_pos", "num_drafts_per_pos"):
            pairs = itertools.zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [here + there for here, there in pairs])
        self.seconds.add(other.seconds)

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per target call (0 before the first)."""
        return self.num_tokens / max(self.num_target_calls, 1)

    @property
    def discard_rate(self) -> float:
        """Discarded drafted tokens per emitted token (SpecDec++, arXiv 2405.19715, section 2.3)."""
        return (self.num_draft_tokens - self.num_accepted_tokens) / max(self.num_tokens, 1)

    @property
    def verification_rate(self) -> float:
        """Target calls per emitted token (SpecDec++, arXiv 2405.19715, section 2.3)."""
        return self.num_target_calls / max(self.num_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the request's wall-clock time."""
        return self.num_tokens / self.seconds.total if self.seconds.total > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        counts = asdict(self)
        del counts["seconds"]  # added at the end, with `other`
        return {**counts, **{name: getattr(self, name) for name in RATES}, "seconds": self.seconds.to_dict()}


def total_stats(each: Iterable[Stats]) -> Stats:
    """Counts and seconds added up."""
    total = Stats()
    for one in each:
        total.add(one)
    return total
