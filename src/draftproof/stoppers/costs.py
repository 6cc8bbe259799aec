"""What rounds cost, learned from the time of each round while requests are decoded; nothing is measured beforehand.

The speed of a machine changes: other processes come and go. So no figure here is a number of seconds. The time of
drafting is divided by the rest of the same round, and the rest of a round with a draft by the rest of a plain round
next to it. What slows down the whole machine divides out, and what hits a single round is an outlier among medians.
All costs are in units of the plain round of the same number of requests.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from draftproof.stoppers.base import Mean, RoundTime
from draftproof.theory.cost import RoundCosts

WINDOW, PAIRS = 32, 12  # newest figures that count: of drafting, and of neighbouring rounds, which are fewer
TRIALS = 3  # rounds of each kind that are needed before figures count as known
REFRESH = (4, 128)  # drafted rounds after which a plain round shows what a plain round takes: at first, and later
SHORT, LONG = 1.0, 8.0  # drafted tokens at which an assumption counts as a figure
DOUBT = 1.5  # figures further from the line than this factor contradict it
OUTLIER = 3.0  # figures further from the others than this factor do not count
LOSS, REGAIN, DEBT = 2.0, 0.01, 2.0  # plain rounds of one request that may be lost at first, regained, and owed
UNSETTLED = 6  # drafted rounds of one request whose gain is not counted yet, while little is known of costs
UNKNOWN = RoundCosts(target=1.0, draft=0.35, token=0.02, more=0.05, begin=0.05)


class Line:
    """y = start + slope x, by least squares through the medians of the newest figures with equal x.

    An assumed line counts as a few figures, fewer the more figures there are; before that it is scaled to them, so that
    only its form is assumed.

    Args:
        start: of the assumed line.
        slope: of the assumed line.
        size: number of figures that count.
        kept: how many figures the assumed line stands for, where it was learned earlier.
        unit: what a figure is multiplied by, from its number of drafted tokens, where that may change later.
        floor: smallest start; what is assumed of the form of the line is assumed of what lies above it.
        least: smallest slope, as a share of the mean y over the mean x; against noise where all x are alike.
    """

    def __init__(
        self,
        start: float,
        slope: float,
        *,
        size: int = WINDOW,
        kept: int = 0,
        unit: Callable[[Mean], float] = lambda _: 1.0,
        least: float = 0.0,
        floor: float = 0.0,
    ) -> None:
        self.assumed = (start, slope)
        self.kept = kept
        self.doubts = 0  # newest figures in a row that contradict the line
        self.unit = unit
        self._least = least
        self._floor = floor
        self._size = size
        self.figures: list[tuple[Mean, Mean, float]] = []  # x, number of drafted tokens, y
        self._fitted: tuple[float, float] | None = (start, slope)

    def add(self, x: Mean, y: float, nodes: Mean) -> None:
        """Add a figure; when as many in a row contradict the line as make it known, older ones are dropped."""
        start, slope = self.fitted
        known = len(self.figures) >= TRIALS or self.kept
        agrees = 1 / DOUBT < y * self.unit(nodes) / max(start + slope * x, 1e-9) < DOUBT
        self.doubts = 0 if agrees or not known else self.doubts + 1
        self.figures.append((x, nodes, y))
        if self.doubts >= TRIALS:
            self.figures = self.figures[-self.doubts :]
            self.kept = self.doubts = 0
        elif len(self.figures) > self._size:
            self._drop()
        self._fitted = None

    def _drop(self) -> None:
        """Drop the oldest of the figures of which there are most, so that many short drafts leave the long ones."""
        kinds = [math.frexp(x)[1] for x, *_ in self.figures]
        most = max(set(kinds), key=kinds.count)
        del self.figures[kinds.index(most)]

    @property
    def lacks(self) -> bool:
        """Whether there are too few figures to choose by, or the newest ones contradict the others."""
        return self.doubts > 0 or len(self.figures) < (1 if self.kept else TRIALS)

    def forget_fit(self) -> None:
        """Fit again when it is needed: the unit has changed."""
        self._fitted = None

    @property
    def fitted(self) -> tuple[float, float]:
        """Start and slope, neither of them negative."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    @property
    def spread(self) -> float:
        """Median distance of the figures from the line, as a share of it; 0 without figures."""
        start, slope = self.fitted
        shares = [y * self.unit(nodes) / max(start + slope * x, 1e-9) for x, nodes, y in self.figures]
        return statistics.median([abs(share - 1) for share in shares] or [0.0])

    def _fit(self) -> tuple[float, float]:
        start, slope = self.assumed
        if not self.figures:
            return self.assumed
        figures = [(x, y * self.unit(nodes)) for x, nodes, y in self.figures]
        ratios = [y / max(start + slope * x, 1e-9) for x, y in figures]
        middle = statistics.median(ratios)
        each: dict[Mean, list[float]] = {}
        for (x, y), ratio in zip(figures, ratios, strict=True):
            if len(ratios) < TRIALS or middle / OUTLIER <= ratio <= middle * OUTLIER:
                each.setdefault(x, []).append(y)
        floor = self._floor
        above = [(y - floor) / max(start - floor + slope * x, 1e-9) for x, y in figures]
        scale = max(statistics.median(above), 0.0)
        scale, weight = (1.0, self.kept / 2) if self.kept else (scale, 1.0 / (1 + len(ratios) / 4))
        points = [(x, floor + scale * (start - floor + slope * x), weight) for x in (SHORT, LONG)]
        points += [(float(x), statistics.median(ys), float(len(ys))) for x, ys in each.items()]
        return _least_squares(points, self._least, self._floor)


def _least_squares(points: Sequence[tuple[float, float, float]], least: float, floor: float) -> tuple[float, float]:
    """Start and slope of the line through weighted points (x, y, weight), with the bounds of `Line`."""
    total = sum(weight for *_, weight in points)
    mean_x = sum(weight * x for x, _, weight in points) / total
    mean_y = sum(weight * y for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread if spread else 0.0
    slope = max(slope, least * mean_y / mean_x, 0.0)
    start = mean_y - slope * mean_x
    if start >= floor:
        return start, slope
    square = sum(weight * x * x for x, _, weight in points)
    return floor, max(sum(weight * x * (y - floor) for x, y, weight in points) / square, 0.0)


class Allowance:
    """How much may be lost to plain decoding by rounds that are made for what they show, in plain rounds.

    Every round adds a little, and what it gained or lost. Where drafts pay, tries are free; where they do not, all
    tries of all drafters and requests together cost a fixed share of the time. A round of several requests shows more
    than one of a single request, and drafts pay less there, so less may be lost: by the root of their number.
    """

    def __init__(self) -> None:
        self.left = LOSS

    def affords(self, loss: float, rows: int, *, short: bool = False) -> bool:
        """Whether a round that is expected to lose so much may be made; a short try may where nothing is owed.

        An expectation may be wrong, and only a try corrects it.
        """
        return loss * math.sqrt(rows) <= self.left or (short and self.left >= 0)

    def settle(self, gained: float, rows: int) -> None:
        """Add a round that made so many plain rounds' tokens more than its time allows, or less."""
        scale = math.sqrt(rows)
        self.left = max(min(self.left + REGAIN + gained * scale, LOSS), -DEBT * scale)


class DraftCosts:
    """What the rest of a round with a draft takes, in plain rounds of the same number of requests.

    Several drafters may share it: the target's pass does not depend on who drafted. `token` is the assumed cost of one
    more drafted token.
    """

    def __init__(self, token: float = UNKNOWN.token) -> None:
        self._token = token
        self._lines: dict[int, Line] = {}
        self._newest: RoundTime | None = None  # None where its time says nothing
        self._since: dict[int, int] = {}
        self._pause: dict[int, int] = {}
        self._plain: dict[int, float] = {}  # rest of the newest plain round, in seconds
        self.version = 0  # rises with every figure
        self.allowance = Allowance()
        self.reading = False  # whether the newest round read a prompt, as the next one may

    def line(self, rows: int) -> Line:
        """Cost of drafted tokens beyond the plain round, by their number, for `rows` requests."""
        size = size_class(rows)
        if size not in self._lines:
            known = [other for other, line in self._lines.items() if line.kept or line.figures]
            near = min(known, key=lambda other: (other > size, abs(other - size)), default=None)
            start, slope = (1.0, self._token) if near is None else self._lines[near].fitted
            self._lines[size] = self._made(start, slope if near is None else _of_more(slope, size / near))
        return self._lines[size]

    @staticmethod
    def _made(start: float, slope: float, kept: int = 0) -> Line:
        return Line(start, slope, size=PAIRS, kept=kept, floor=1.0)

    def rest(self, rows: int, nodes: Mean) -> float:
        """Expected rest of a round with a draft of so many tokens."""
        start, slope = self.line(rows).fitted
        return start + slope * nodes

    def learn(self, time: RoundTime) -> None:
        """Add a round."""
        line, size, other = self.line(time.rows), size_class(time.rows), self._newest
        # A plain round is compared with the rounds beside it only: as one outlier it must not look like a change.
        if other is not None and size_class(other.rows) == size and bool(other.nodes) != bool(time.nodes):
            wide, plain = (time, other) if time.nodes else (other, time)
            line.add(wide.nodes, wide.rest / max(plain.rest, 1e-9), wide.nodes)
            self.version += 1
        self._newest = time
        if time.nodes:
            self.version += 1  # there may be a figure of drafting
            self._since[size] = self._since.get(size, 0) + 1
            if size in self._plain:
                share = time.rest / max(self._plain[size] * self.rest(time.rows, time.nodes), 1e-9)
                if not 1 / DOUBT < share < DOUBT:  # the machine, or the line: a plain round soon tells
                    self._pause[size] = REFRESH[0]
            return
        self._plain[size] = time.rest
        if self.is_old(time.rows):
            self._since[size] = 0
            self._pause[size] = min(2 * self._pause.get(size, REFRESH[0]), REFRESH[1])

    def interrupted(self) -> None:
        """A round whose time says nothing: its neighbours are not compared."""
        self._newest = None

    def lacks(self, rows: int) -> bool:
        """Whether there are too few figures of this number of requests."""
        return self.line(rows).lacks

    def is_old(self, rows: int) -> bool:
        """Whether no plain round was seen for long."""
        size = size_class(rows)
        return self._since.get(size, 0) >= self._pause.get(size, REFRESH[0])

    @property
    def last_was_plain(self) -> bool:
        """Whether the newest round was a plain one that counts."""
        return self._newest is not None and not self._newest.nodes

    def to_dict(self) -> dict[str, list[float]]:
        """The figures, for a file."""
        known = {size: line for size, line in self._lines.items() if line.kept or len(line.figures) >= TRIALS}
        return {str(size): list(line.fitted) for size, line in known.items()}

    def restore(self, found: dict[str, Any]) -> None:
        """Begin with figures that `to_dict` gave in an earlier run."""
        for size, line in _kept_lines(found).items():
            self._lines.setdefault(size, self._made(*line, kept=TRIALS))
        self.version += 1


@dataclass
class LearnedCosts:
    """Costs of rounds with one drafter, in plain rounds: those `assumed`, until the times of rounds teach others.

    Several drafters may share `passes`, the costs of the target's pass.
    """

    shared: ClassVar[bool] = True

    assumed: RoundCosts = UNKNOWN
    passes: DraftCosts = field(default_factory=DraftCosts)
    _drafting: dict[int, Line] = field(default_factory=dict)
    _more: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _current: dict[int, RoundCosts] = field(default_factory=dict)
    _unsettled: deque[tuple[RoundTime, Mean, bool]] = field(default_factory=deque)  # arguments of `settle`
    _version: int = -1  # of the passes that `_current` and the fits of drafting are for

    @property
    def version(self) -> int:
        """Rises with every figure, so that choices can be kept until then."""
        return self.passes.version

    def at(self, rows: int) -> RoundCosts:
        """Costs of a round of `rows` requests, in plain rounds of as many requests."""
        self._follow_passes()
        size = size_class(rows)
        if size not in self._current:
            begin, draft = self._line(size).fitted
            rest, token = self.passes.line(rows).fitted
            more = statistics.median(self._more) if self._more else self.assumed.more
            self._current[size] = RoundCosts(
                target=1.0, draft=draft, token=token, more=more, begin=max(begin + rest - 1, 0.0)
            )
        return self._current[size]

    def _follow_passes(self) -> None:
        """Drop what was fitted with earlier costs of the passes: they are the unit of the figures of drafting."""
        if self._version != self.passes.version:
            self._version = self.passes.version
            self._current.clear()
            for line in self._drafting.values():
                line.forget_fit()

    def _line(self, size: int) -> Line:
        self._follow_passes()
        if size not in self._drafting:
            smaller = max((known for known in self._drafting if known < size), default=None)
            assumed = (self.assumed.begin, self.assumed.draft)
            start, slope = assumed if smaller is None else self._drafting[smaller].fitted
            self._drafting[size] = Line(start, slope, unit=partial(self.passes.rest, size), least=0.5)
        return self._drafting[size]

    def learn(self, time: RoundTime, drafts: int = 1, *, drafting: bool = True) -> None:
        """Add a round; `drafting` is false where a draft model first had to read other tokens."""
        if time.depth and drafting and time.rest > 0:
            line = self._line(size_class(time.rows))
            if drafts == 1:
                line.add(time.depth, time.draft / time.rest, time.nodes)
            else:
                start, slope = line.fitted
                share = time.draft / time.rest * self.passes.rest(time.rows, time.nodes)
                self._more.append(max(share - start - slope * time.depth, 0.0) / time.depth / (drafts - 1))
        self.passes.learn(time)

    def settle(self, time: RoundTime, accepted: Mean, *, caught_up: bool = False) -> None:
        """Count what a round gained over plain decoding; the first drafts count when more is known of costs.

        Rounds of many requests cost more and show more, so fewer of them wait to be counted. `accepted` is the mean
        over the requests; `caught_up`, whether the draft model first had to read other tokens.
        """
        if not time.depth:
            self.passes.allowance.settle(0.0, time.rows)
            return
        self._unsettled.append((time, accepted, caught_up))
        most = UNSETTLED // time.rows
        while self._unsettled and (len(self._unsettled) > most or not self.lacks(time.rows)):
            settled = self._unsettled.popleft()
            self.passes.allowance.settle(self._gained(*settled), settled[0].rows)

    def _gained(self, time: RoundTime, accepted: Mean, caught_up: bool) -> float:
        """Plain rounds that a round gained; the time of drafting is what was seen or what is known, the less of them.

        What was seen may be an outlier, and what is known a figure from a busy machine. What a draft model had to catch
        up with is only seen.
        """
        rest, (begin, draft) = self.passes.rest(time.rows, time.nodes), self._line(size_class(time.rows)).fitted
        seen = rest * time.draft / max(time.rest, 1e-9)
        return 1 + accepted - rest - (seen if caught_up else min(begin + draft * time.depth, seen))

    def lacks(self, rows: int) -> bool:
        """Whether there are too few figures of this number of requests to choose by them."""
        return self._line(size_class(rows)).lacks or self.passes.lacks(rows)

    def knows_fewer(self, rows: int) -> bool:
        """Whether there are enough figures of some smaller number of requests."""
        return any(size < size_class(rows) and len(line.figures) >= TRIALS for size, line in self._drafting.items())

    def to_dict(self) -> dict[str, Any]:
        """The figures with their spread, for a file."""
        self._follow_passes()
        known = {size: line for size, line in self._drafting.items() if line.kept or len(line.figures) >= TRIALS}
        return {
            "draft": {str(size): list(line.fitted) for size, line in known.items()},
            "spread": {str(size): round(line.spread, 3) for size, line in known.items()},
            "rest": self.passes.to_dict(),
        }

    def restore(self, found: dict[str, Any]) -> None:
        """Begin with figures that `to_dict` gave in an earlier run; what contradicts them outvotes them."""
        lines = _kept_lines(found["draft"])
        self.passes.restore(found["rest"])
        for size, line in lines.items():
            self._drafting[size] = Line(*line, kept=TRIALS, unit=partial(self.passes.rest, size), least=0.5)


def _of_more(slope: float, times: float) -> float:
    """The cost of one more token of each request in plain rounds, for a multiple of the requests, from that of fewer.

    A pass for r tokens takes a + b r, so the cost is b r / (a + b r) for r requests, which is below 1.
    """
    return slope if slope >= 1 else times * slope / (1 + (times - 1) * slope)


def _kept_lines(found: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Start and slope by number of requests, as a file has them."""
    made = {int(size): (float(start), float(slope)) for size, (start, slope) in found.items()}
    for size, line in made.items():
        if size < 1 or not all(0 <= figure < math.inf for figure in line):
            raise ValueError(f"expected finite costs, 0 or more, got {line} for {size} requests")
    return made


def size_class(rows: int) -> int:
    """Numbers of requests whose figures count together: 1, 2, 3 to 4, 5 to 8, ... are named by the largest of them."""
    return 1 << max(rows - 1, 0).bit_length()
