"""The costs of rounds, learned from the time of each round during decoding; nothing is measured beforehand.

The speed of a machine changes as other processes come and go. So costs are ratios, not seconds: the time of drafting is
divided by the rest of the same round, and the rest of a round with a draft by the rest of a neighbouring plain round.
A slower machine cancels out, and a disturbance of a single round is an outlier among medians. The unit of all costs is
a plain round of the same number of requests.
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

READINGS = 8  # newest figures that count, of the cost of reading
WINDOW, PAIRS = 32, 12  # newest figures that count: of drafting, and of neighbouring rounds, which are fewer
TRIALS = 3  # rounds of each kind that are needed before costs count as known
REFRESH = (4, 128)  # drafted rounds after which a plain round is measured again: at first, and later
SHORT, LONG = 1.0, 8.0  # numbers of drafted tokens at which the assumed line counts as a figure
DOUBT = 1.5  # figures further from the line than this factor contradict it
OUTLIER = 3.0  # figures further from the others than this factor do not count
LOSS, REGAIN, DEBT = 2.0, 0.01, 2.0  # plain rounds of one request: allowed loss at first, gain per round, largest debt
SAVED = 4.0  # the most that is saved for measuring rounds that lose much, in plain rounds of one request
LONG_READ = 16  # tokens of prompts in a round from which the cost of reading is learned
FEW = 0.25  # drafted tokens of a request, on average, below which a round says too little about their cost
LARGEST = 0.95  # largest share of a plain round that is reckoned with for products
READ_SHARE = 0.5  # assumed cost of a drafted token in the target's pass, relative to one that is read among many
UNSETTLED = 6  # drafted rounds of one request whose gain is counted later, while costs are hardly known
UNKNOWN = RoundCosts(target=1.0, draft=0.35, token=0.02, more=0.05, begin=0.05)


class Line:
    """y = start + slope x, by least squares through the medians of the newest figures with equal x.

    An assumed line counts as a few figures, with less weight the more figures there are. It is first scaled to the
    figures, so that only its form is assumed.

    Args:
        start: of the assumed line.
        slope: of the assumed line.
        size: number of figures that count.
        kept: how many figures the assumed line stands for, if it was learned in an earlier run.
        unit: the factor of a figure, by its number of drafted tokens; it may change later.
        floor: smallest start; the assumed form is that of the part above it.
        least: smallest slope, as a share of the mean y over the mean x; against noise if all x are similar.
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
        """Add a figure; if TRIALS figures in a row contradict the line, the older ones are dropped."""
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
        """Drop the oldest figure of the most frequent length, so that short drafts do not displace long ones."""
        kinds = [math.frexp(x)[1] for x, *_ in self.figures]
        most = max(set(kinds), key=kinds.count)
        del self.figures[kinds.index(most)]

    @property
    def known(self) -> bool:
        """Whether there are figures, of this run or of an earlier one."""
        return self.kept > 0 or bool(self.figures)

    @property
    def lacks(self) -> bool:
        """Whether there are too few figures, or the newest ones contradict the others."""
        return self.doubts > 0 or len(self.figures) < (1 if self.kept else TRIALS)

    def forget_fit(self) -> None:
        """Discard the fit, because the unit has changed."""
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
    """The time, in plain rounds, that measuring rounds may lose to plain decoding.

    Every round adds a little, plus its own gain or loss. If drafts pay, trials are free; if they do not, all trials of
    all drafters and requests together cost a fixed share of the time. A round of several requests measures more than
    one of a single request, and drafts pay less there, so less may be lost: by the square root of their number.
    """

    def __init__(self) -> None:
        self.left = LOSS

    def affords(self, loss: float, rows: int, *, short: bool = False, once: float = 0.0) -> bool:
        """Whether a trial with this expected loss is allowed; a short one always is, unless there is a debt.

        The expectation may be wrong, and only a trial corrects it. TRIALS of them are needed; what they lose `once` is
        not lost again.
        """
        return (TRIALS * loss + once) * math.sqrt(rows) <= self.left or (short and self.left >= 0)

    def settle(self, gained: float, rows: int) -> None:
        """Add the gain of a round over plain decoding, in plain rounds; negative for a loss."""
        scale = math.sqrt(rows)
        self.left = max(min(self.left + REGAIN + gained * scale, SAVED), -DEBT * scale)

    def earn(self, rounds: float) -> None:
        """Add what so many plain rounds' time regains."""
        self.left = min(self.left + REGAIN * rounds, SAVED)

    def forgive(self) -> None:
        """End a debt, since losses were counted with costs that were far too high."""
        self.left = max(self.left, 0.0)


class DraftCosts:
    """The cost of a round with a draft apart from drafting, in plain rounds of the same number of requests.

    Several drafters may share it, since the target's pass does not depend on the drafter. `token` is the assumed cost
    of one more drafted token.
    """

    def __init__(self, token: float = UNKNOWN.token) -> None:
        self._token = token
        self._lines: dict[int, Line] = {}
        self._newest: RoundTime | None = None  # None if its time is not comparable
        self._since: dict[int, int] = {}
        self._pause: dict[int, int] = {}
        self._plain: dict[int, float] = {}  # rest of the newest plain round, in seconds
        # by number of requests: the newest round that read prompts, till a plain round follows; and the newest costs of
        # a token that is read among many, in plain rounds
        self._read: dict[int, RoundTime] = {}
        self._asking = 0  # the number of requests of that round
        self._reading: dict[int, deque[float]] = {}
        self.version = 0  # rises with every figure
        self._assumed: dict[int, int] = {}  # version for which the line of a number of requests was assumed
        self.allowance = Allowance()
        self.reading = False  # whether the newest round read a prompt; the next one may, too

    def line(self, rows: int) -> Line:
        """Cost of drafted tokens beyond the plain round, by their number, for `rows` requests.

        Without a figure it is assumed from those of other numbers of requests, and from the cost of reading.
        """
        size = size_class(rows)
        line = self._lines.get(size)
        if line is None or (not line.known and self._assumed.get(size) != self.version):
            self._assumed[size] = self.version
            known = [other for other, line in self._lines.items() if line.known]
            near = min(known, key=lambda other: (other > size, abs(other - size)), default=None)
            start, slope = (1.0, self._token) if near is None else self._lines[near].fitted
            slope = slope if near is None else _of_more(slope, size / near)
            read = self.read(size)
            self._lines[size] = self._new_line(start, slope if read is None else max(slope, READ_SHARE * size * read))
        return self._lines[size]

    def read(self, rows: int) -> float | None:
        """Cost of one token that is read among many, in plain rounds of `rows` requests; None if nothing is known."""
        size = size_class(rows)
        near = min(self._reading, key=lambda other: abs(other - size), default=None)
        if near is None:
            return None
        cost = statistics.median(self._reading[near])  # a round of r requests takes a + b r, and a token costs b
        return cost / max(1 + (size - near) * cost, cost * size)

    def ratio(self, rows: int, other: int) -> float:
        """The time of a plain round of `rows` requests, relative to that of a plain round of `other` requests."""
        slope = min(self.line(rows).fitted[1], 1.0)
        one = slope / (rows - (rows - 1) * slope)  # of one more token of one request, in its plain rounds
        return (1 + (rows - 1) * one) / (1 + (other - 1) * one)

    def learn_reading(self, time: RoundTime) -> None:
        """Note a round that read prompts: its time is compared with that of the next plain round."""
        self.interrupted()
        size = size_class(time.rows)
        if not time.nodes and time.prompt >= LONG_READ:
            self._read[size] = time
            self._asking = size
            if (read := self.read(size)) is not None:
                self.allowance.earn(1 + read * time.prompt)

    def _compare_reading(self, time: RoundTime) -> None:
        """The cost of reading from the newest round that read prompts, and a plain round of as many requests."""
        size = size_class(time.rows)
        if (reading := self._read.pop(size, None)) is not None and time.rest > 0:
            cost = (reading.rest / time.rest - 1) / reading.prompt
            if cost > 0:
                self._reading.setdefault(size, deque(maxlen=READINGS)).append(cost)
                self.version += 1

    @staticmethod
    def _new_line(start: float, slope: float, kept: int = 0) -> Line:
        return Line(start, slope, size=PAIRS, kept=kept, floor=1.0)

    def rest(self, rows: int, nodes: Mean) -> float:
        """Expected rest of a round with a draft of this many tokens."""
        start, slope = self.line(rows).fitted
        return start + slope * nodes

    def learn(self, time: RoundTime) -> None:
        """Add a round."""
        line, size, other = self.line(time.rows), size_class(time.rows), self._newest
        # A plain round is only compared with its neighbours: a single outlier must not look like a change.
        wide, plain = (time, other) if time.nodes else (other, time)
        same = other is not None and size_class(other.rows) == size and bool(other.nodes) != bool(time.nodes)
        if same and wide is not None and plain is not None and wide.nodes >= FEW:
            before = self.rest(time.rows, wide.nodes)
            line.add(wide.nodes, wide.rest / max(plain.rest, 1e-9), wide.nodes)
            self.version += 1
            if self.rest(time.rows, wide.nodes) * DOUBT < before:
                self.allowance.forgive()
        self._newest = time
        if time.nodes:
            self.version += 1  # there may be a figure of drafting
            self._since[size] = self._since.get(size, 0) + 1
            if size in self._plain:
                share = time.rest / max(self._plain[size] * self.rest(time.rows, time.nodes), 1e-9)
                if not 1 / DOUBT < share < DOUBT:  # the machine or the line changed: a plain round will show which
                    self._pause[size] = REFRESH[0]
            return
        self._plain[size] = time.rest
        self._compare_reading(time)
        if self.is_old(time.rows):
            self._since[size] = 0
            self._pause[size] = min(2 * self._pause.get(size, REFRESH[0]), REFRESH[1])

    def interrupted(self) -> None:
        """Note a round whose time is not comparable: its neighbours are not compared with it."""
        self._newest = None

    def lacks(self, rows: int) -> bool:
        """Whether there are too few figures for this number of requests."""
        return self.line(rows).lacks

    def is_old(self, rows: int) -> bool:
        """Whether the last plain round was long ago."""
        size = size_class(rows)
        return self._since.get(size, 0) >= self._pause.get(size, REFRESH[0])

    def asks_for_plain(self, rows: int) -> bool:
        """Whether a plain round now gives the first figure of all: what reading costs. It is asked for once."""
        asks = self._asking == size_class(rows) and not self._reading and not self.line(rows).known
        self._asking = 0
        return asks

    def is_foretold(self, rows: int, *, earlier: bool = True) -> bool:
        """Whether the costs of wider passes of this number of requests are known from before anything was drafted."""
        line = self.line(rows)
        return not line.doubts and ((earlier and line.kept > 0) or (bool(self._reading) and not line.figures))

    @property
    def last_was_plain(self) -> bool:
        """Whether the newest round was plain and comparable."""
        return self._newest is not None and not self._newest.nodes

    def to_dict(self) -> dict[str, list[float]]:
        """The figures, for a file."""
        known = {size: line for size, line in self._lines.items() if line.kept or len(line.figures) >= TRIALS}
        return {str(size): list(line.fitted) for size, line in known.items()}

    def reading_to_dict(self) -> dict[str, float]:
        """The costs of reading by number of requests, for a file."""
        return {str(size): statistics.median(costs) for size, costs in self._reading.items()}

    def restore_reading(self, found: dict[str, Any]) -> None:
        """Start from costs that `reading_to_dict` returned in an earlier run."""
        costs = {int(size): float(cost) for size, cost in found.items()}
        if any(size < 1 or not 0 < cost < math.inf for size, cost in costs.items()):
            raise ValueError(f"expected finite costs of reading above 0, got {costs}")
        for size, cost in costs.items():
            self._reading.setdefault(size, deque([cost], maxlen=READINGS))
        self.version += 1

    def restore(self, found: dict[str, Any]) -> None:
        """Start from figures that `to_dict` returned in an earlier run."""
        for size, line in _stored_lines(found).items():
            if not self.line(size).known:
                self._lines[size] = self._new_line(*line, kept=TRIALS)
        self.version += 1


@dataclass
class LearnedCosts:
    """Costs of rounds with one drafter, in plain rounds: `assumed` at first, then learned from the times of rounds.

    Several drafters may share `passes`, the costs of the target's pass.
    """

    shared: ClassVar[bool] = True

    assumed: RoundCosts = UNKNOWN
    passes: DraftCosts = field(default_factory=DraftCosts)
    all_products: bool = False  # whether drafting a token takes as many products as a pass of the target
    _drafting: dict[int, Line] = field(default_factory=dict)
    _more: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _current: dict[int, RoundCosts] = field(default_factory=dict)
    _unsettled: deque[tuple[RoundTime, Mean, bool, int]] = field(default_factory=deque)  # arguments of `settle`
    _version: int = -1  # of the passes that `_current` and the fits of drafting are for

    @property
    def version(self) -> int:
        """Rises with every figure, so that choices can be cached until then."""
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
        """Discard fits made with earlier costs of passes, which are the unit of the figures of drafting."""
        if self._version != self.passes.version:
            self._version = self.passes.version
            self._current.clear()
            for line in self._drafting.values():
                line.forget_fit()

    def _line(self, size: int) -> Line:
        self._follow_passes()
        if size not in self._drafting or not self._drafting[size].known:
            smaller = max(
                (other for other, line in self._drafting.items() if other < size and line.known), default=None
            )
            assumed = (self.assumed.begin, self.assumed.draft)
            start, slope = assumed if smaller is None else self._drafting[smaller].fitted
            if self.all_products:
                slope = self._with_all_products(slope, smaller, size)
            self._drafting[size] = Line(start, slope, unit=partial(self.passes.rest, size), least=0.5)
        return self._drafting[size]

    def read(self, rows: int) -> float | None:
        """Cost of a token that the draft model reads among many, in plain rounds of `rows` requests, if it is known.

        It is to the target's cost of reading as a pass of the draft model is to the target's, and at most that.
        """
        read = self.passes.read(rows)
        return None if read is None else read * min(self.at(rows).draft, 1.0)

    def _with_all_products(self, slope: float, smaller: int | None, size: int) -> float:
        """The cost of a drafted token in a batch of `size`, from that in a smaller batch or from the share of bytes.

        A plain round of r requests takes a + b r: it reads weights in the time a, and has products of each request.
        """
        few = 0.0 if smaller is None else min(self.passes.line(smaller).fitted[1], LARGEST)
        many = min(self.passes.line(size).fitted[1], 1.0)
        return max((slope - few) / (1 - few), 0.0) * (1 - many) + many

    def learn(self, time: RoundTime, drafts: int = 1, *, drafting: bool = True, rows: int | None = None) -> None:
        """Add a round.

        Args:
            time: of the round.
            drafts: number of drafts of each request.
            drafting: false if a draft model first had to read other tokens.
            rows: number of requests with drafts, if others had none.
        """
        if time.depth and drafting and time.rest > 0:
            few = time.rows if rows is None else rows
            line = self._line(size_class(few))
            if few < time.rows:
                share = time.draft / time.rest * self.passes.rest(time.rows, time.nodes)
                line.add(time.depth, share * self.passes.ratio(time.rows, few), 0)
            elif drafts == 1:
                line.add(time.depth, time.draft / time.rest, time.nodes)
            else:
                start, slope = line.fitted
                share = time.draft / time.rest * self.passes.rest(time.rows, time.nodes)
                self._more.append(max(share - start - slope * time.depth, 0.0) / time.depth / (drafts - 1))
        self.passes.learn(time)

    def settle(self, time: RoundTime, accepted: Mean, *, caught_up: bool = False, rows: int | None = None) -> None:
        """Count the gain of a round over plain decoding; the first drafts are counted when costs are better known.

        Rounds of many requests cost more and measure more, so fewer of them wait to be counted. `accepted` is the mean
        over the requests; `caught_up` says whether the draft model first had to read other tokens, and `rows` how many
        requests had drafts, if others had none.
        """
        few = time.rows if rows is None else rows
        if not time.depth:
            self.passes.allowance.settle(0.0, time.rows)
            return
        self._unsettled.append((time, accepted, caught_up or few < time.rows, few))
        most = UNSETTLED // few
        while self._unsettled and (len(self._unsettled) > most or not self.lacks(time.rows)):
            settled, made, read, drafting = self._unsettled.popleft()
            self.passes.allowance.settle(self._gained(settled, made, read), drafting)

    def _gained(self, time: RoundTime, accepted: Mean, caught_up: bool) -> float:
        """The gain of a round, in plain rounds; the time of drafting is the measured or the expected one, if less.

        The measurement may be an outlier, and the expectation may be from a busy machine. The time of catching up is
        only measured.
        """
        rest, (begin, draft) = self.passes.rest(time.rows, time.nodes), self._line(size_class(time.rows)).fitted
        measured = rest * time.draft / max(time.rest, 1e-9)
        return 1 + accepted - rest - (measured if caught_up else min(begin + draft * time.depth, measured))

    def lacks(self, rows: int) -> bool:
        """Whether there are too few figures for this number of requests to choose by them."""
        drafting = self._line(size_class(rows)).lacks and not self.knows_fewer(rows)
        return drafting or self.passes.lacks(rows)

    def is_foretold(self, rows: int, *, earlier: bool = True) -> bool:
        """Whether the costs of this number of requests are no mere guess, though none of them was measured yet.

        Args:
            rows: number of requests.
            earlier: whether to believe figures of an earlier run.
        """
        return not self._line(size_class(rows)).figures and self.passes.is_foretold(rows, earlier=earlier)

    def knows_fewer(self, rows: int) -> bool:
        """Whether there are enough figures for some smaller number of requests."""
        return any(size < size_class(rows) and len(line.figures) >= TRIALS for size, line in self._drafting.items())

    def to_dict(self) -> dict[str, Any]:
        """The figures with their spread, for a file."""
        self._follow_passes()
        known = {size: line for size, line in self._drafting.items() if line.kept or len(line.figures) >= TRIALS}
        return {
            "draft": {str(size): list(line.fitted) for size, line in known.items()},
            "spread": {str(size): round(line.spread, 3) for size, line in known.items()},
            "rest": self.passes.to_dict(),
            "read": self.passes.reading_to_dict(),
        }

    def restore(self, found: dict[str, Any]) -> None:
        """Start from figures that `to_dict` returned in an earlier run; contradicting figures soon replace them."""
        lines = _stored_lines(found["draft"])
        self.passes.restore(found["rest"])
        self.passes.restore_reading(found.get("read", {}))
        for size, line in lines.items():
            self._drafting[size] = Line(*line, kept=TRIALS, unit=partial(self.passes.rest, size), least=0.5)


def _of_more(slope: float, times: float) -> float:
    """The cost of one more token of each request, in plain rounds, for `times` as many requests.

    A pass for r tokens takes a + b r, so the cost for r requests is b r / (a + b r), which is below 1.
    """
    return slope if slope >= 1 else times * slope / (1 + (times - 1) * slope)


def _stored_lines(found: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Start and slope by number of requests, from a file."""
    lines = {int(size): (float(start), float(slope)) for size, (start, slope) in found.items()}
    for size, line in lines.items():
        if size < 1 or not all(0 <= figure < math.inf for figure in line):
            raise ValueError(f"expected finite costs, 0 or more, got {line} for {size} requests")
    return lines


def size_class(rows: int) -> int:
    """The largest number in the class of `rows`; classes (1, 2, 3 to 4, 5 to 8, ...) have figures in common."""
    return 1 << max(rows - 1, 0).bit_length()
