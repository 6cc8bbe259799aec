"""What a round costs on this machine: measured once for a pair of models, and kept.

Knows: runs of an engine, their clocks, a file of results. Does not know: what the figures are used for.

The same file gives the same figures, so a request with a seed is answered alike by every later run on this machine.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.engine.stats import Stats
from draftproof.errors import reason
from draftproof.files import whole_file
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.theory.cost import BatchCosts, RoundCosts

PROMPT, ROUNDS, REPEATS = 32, 10, 3
LENGTHS = (2, 8)  # a line through two lengths
_VERSION = 5
_log = logging.getLogger(__name__)


def known_costs(engine: Engine, file: Path) -> BatchCosts:
    """The costs of an engine's rounds for one request and for as many as it takes, from the file where they are in it.

    Args:
        engine: with a drafter that has a stopper.
        file: JSON; written whole, other pairs' figures kept. Where it cannot be written, a warning says so, and the
            costs serve this engine alone.
    """
    sizes = tuple(dict.fromkeys((1, engine.max_batch)))
    return BatchCosts(sizes, tuple(_known(engine, file, size) for size in sizes))


def _known(engine: Engine, file: Path, rows: int) -> RoundCosts:
    key, found = f"{_key(engine)} | batch {rows}", _read(file)
    if key in found:
        return RoundCosts(**found[key])
    _log.info("measuring once what a round of %d costs with %s, kept in %s", rows, engine.target.name, file)
    costs = measured_costs(engine, rows)
    try:
        with whole_file(file) as work:
            work.write_text(json.dumps({**_read(file), key: asdict(costs)}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        _log.warning(
            "%s cannot be written (%s), so round costs are measured at every start: set DRAFTPROOF_HOME to a folder "
            "that can, or name a stopper other than auto",
            file,
            reason(error),
        )
    return costs


def measured_costs(engine: Engine, rows: int = 1) -> RoundCosts:
    """Seconds of rounds without a draft, of beginning one, of a drafted token, and of what it and further drafts add.

    Some short runs with constant lengths, and with all drafts that the drafter makes, in turns; the medians of their
    rounds count. The engine is left as it was.

    Args:
        engine: idle, with a drafter that has a stopper.
        rows: requests that share a round.
    """
    drafter: Any = engine.drafter
    kept, most = drafter.stopper, getattr(drafter, "most", 1)
    lengths = sorted({min(length, drafter.limit) for length in LENGTHS})  # prefix trees may be less deep
    single = [(length, 1) for length in lengths]
    several = [(lengths[-1], most)] if most > 1 else []
    ways = [(0, 1), *single, *several]
    drafting: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
    rest: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
    try:
        for repeat in range(REPEATS + 1):
            for way in ways:
                rounds = _rounds(engine, drafter, way, rows)
                full = [one.seconds for one in rounds if one.num_draft_tokens >= way[0]]
                if repeat:  # the first run warms up
                    drafting[way] += [one.draft for one in full]
                    rest[way] += [one.total - one.draft if way[0] else one.total for one in full]
    finally:
        drafter.stopper = kept
    target = statistics.median(rest[0, 1])
    if not all(rest.values()):  # nothing was drafted, say after a prompt that the draft cannot read
        return RoundCosts(target, target)
    spent = {way: (statistics.median(drafting[way]), statistics.median(rest[way]) - target) for way in ways[1:]}
    draft = _slope(lengths, [spent[way][0] for way in single], least=0.5)
    token = _slope(lengths, [spent[way][1] for way in single], least=0.0)
    begin = max(sum(spent[single[0]]) - lengths[0] * (draft + token), 0.0)
    more = 0.0
    for way in several:
        more = max(spent[way][0] - spent[single[-1]][0], 0.0) / way[0] / (most - 1)
        token = max(token, spent[way][1] / (way[0] * most))
    return RoundCosts(target=target, draft=draft, token=token, more=more, begin=begin)


def _slope(lengths: Sequence[int], seconds: Sequence[float], *, least: float) -> float:
    """Seconds that one more token takes, between the shortest draft and the longest.

    Args:
        lengths: of drafts.
        seconds: of a round with each.
        least: share of a token's part of the longest that noise may not push it below; above all of it neither.
    """
    whole = max(seconds[-1] / lengths[-1], 0.0)
    if len(lengths) == 1:
        return whole
    return min(max((seconds[-1] - seconds[0]) / (lengths[-1] - lengths[0]), least * whole), whole)


def _rounds(engine: Engine, drafter: Any, way: tuple[int, int], rows: int) -> list[Stats]:
    """Statistics of each round of a short run as its first request has them, without those that read the prompts."""
    length = way[0]
    drafter.stopper = _Bounded(*way)
    width = engine.target.vocab_size
    room = ROUNDS * (length + 1) + 1
    requests = []
    for row in range(rows):
        prompt = [(7919 * place + row + 1) % width for place in range(PROMPT)]
        requests += engine.add(prompt, SamplingParams(max_tokens=room, seed=1 + row, ignore_eos=True))
    first, found = requests[0], []
    try:
        for _ in range(ROUNDS):
            if any(request.finished for request in requests):
                break
            first.stats = Stats()
            engine.step()
            found.append(first.stats)
    finally:
        for request in requests:
            engine.abort(request)
    return found[2:]


class _Bounded(FixedLength):
    """A constant length that may be 0, and a constant number of drafts."""

    def __init__(self, length: int, drafts: int) -> None:
        super().__init__(max(length, 1))
        self._wanted, self._drafts = length, drafts

    def wanted(self, row: int) -> int:  # noqa: ARG002
        """That length."""
        return self._wanted

    def drafts(self, row: int, most: int) -> int:  # noqa: ARG002
        """That number, as far as it can be had."""
        return min(self._drafts, most)


def _key(engine: Engine) -> str:
    """Names the models, how they are run, and the machine's threads."""
    drafter: Drafter = engine.drafter
    target = engine.target
    backend = getattr(getattr(drafter, "model", None), "backend", target)
    dtype, products = getattr(target, "dtype", ""), getattr(target, "products", "")
    names = (target.name, type(target).__name__, products, backend.name, drafter.name, dtype, target.device)
    return " | ".join(map(str, (_VERSION, *names, f"{torch.get_num_threads()} of {os.cpu_count()} threads")))


def _read(file: Path) -> dict[str, Any]:
    """What the file holds; nothing if it is not there or is none of ours."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    names = {field.name for field in fields(RoundCosts)}
    rows: Sequence[tuple[str, Any]] = list(found.items()) if isinstance(found, dict) else []
    return {name: row for name, row in rows if isinstance(row, dict) and set(row) == names}
