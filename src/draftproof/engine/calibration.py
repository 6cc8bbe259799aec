"""What a round costs on this machine, and how drafts fare: measured once for a pair of models, and kept.

Knows: runs of an engine, their clocks and counts, a file of results. Does not know: what the figures are used for.

The same file gives the same figures, so a request with a seed is answered alike by every later run on this machine.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from operator import sub
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftproof.backends.base import Backend, Feed
from draftproof.drafters.draft_model import ModelBacked
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.stats import Stats
from draftproof.errors import reason
from draftproof.files import whole_file
from draftproof.sampling import SamplingParams
from draftproof.stoppers.base import AcceptanceRates
from draftproof.stoppers.fixed import FixedLength
from draftproof.theory.cost import BatchCosts, RoundCosts

PROMPT, ROUNDS, REPEATS = 32, 8, 3
WARM = 0.03  # seconds until rounds of one kind are as fast as they get; two of them at least
SECONDS, MOST = 3.0, 60  # rounds of small models are so short that a burst of noise would outlast three repeats
LENGTHS = (2, 8)  # a line through two lengths
TEXTS, TOKENS, DRAFTED = 16, 48, 4  # that acceptance is counted in: about 400 rounds, a standard error of 0.03
_VERSION = 6
_Kept = TypeVar("_Kept", RoundCosts, AcceptanceRates)
_log = logging.getLogger(__name__)


def known_costs(engine: DecodingLoop, file: Path) -> BatchCosts:
    """The costs of an engine's rounds for one request and for as many as it takes, from the file where they are in it.

    Args:
        engine: with a drafter that has a stopper.
        file: JSON; written whole, other pairs' figures kept. Where it cannot be written, a warning says so, and the
            costs serve this engine alone.
    """
    sizes = tuple(dict.fromkeys((1, engine.max_batch)))

    def of(rows: int) -> RoundCosts:
        return _known(engine, file, f"batch {rows}", RoundCosts, lambda each: measured_costs(each, rows))

    return BatchCosts(sizes, tuple(map(of, sizes)))


def known_acceptance(engine: DecodingLoop, file: Path) -> AcceptanceRates:
    """How often drafted tokens are accepted in texts that the target begins by itself; from the same file.

    Args:
        engine: as for `known_costs`.
        file: likewise.
    """
    model = _stopped(engine).model
    drawn = f"{_fingerprint(model.backend)} {model.changes}"
    what = f"accepted | {engine.verifier.name} | {_fingerprint(engine.target)} | {drawn}"
    return _known(engine, file, what, AcceptanceRates, measured_acceptance)


def _fingerprint(backend: Backend) -> str:
    """A number that other weights under the same name would hardly have: the size of the logits after one token."""
    session = backend.open()
    try:
        logits = backend.forward([Feed(session, [0])])[0].logits
    finally:
        session.close()
    return f"{float(logits.double().nan_to_num(neginf=0.0).norm()):.6g}"


def _known(
    engine: DecodingLoop, file: Path, what: str, kind: type[_Kept], measure: Callable[[DecodingLoop], _Kept]
) -> _Kept:
    key, found = f"{_key(engine)} | {what}", _read(file)
    row, names = found.get(key), {field.name for field in fields(kind)}
    if isinstance(row, dict) and set(row) == names:
        return kind(**row)
    part = what.split(" |", maxsplit=1)[0]
    _log.info("measuring once (%s) what rounds with %s cost and yield, kept in %s", part, engine.target.name, file)
    made = measure(engine)
    try:
        with whole_file(file) as work:
            work.write_text(json.dumps({**_read(file), key: asdict(made)}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        _log.warning(
            "%s cannot be written (%s), so rounds are measured at every start: set DRAFTPROOF_HOME to a folder "
            "that can, or name a stopper other than auto",
            file,
            reason(error),
        )
    return made


def measured_acceptance(engine: DecodingLoop) -> AcceptanceRates:
    """Rates of first tokens and of those after an accepted one, with drafts of a few tokens at temperature 1.

    The texts begin at the tokenizer's first token, so that they are of the kind the target writes by itself; prompts to
    come may do better or worse.

    Args:
        engine: idle, with a drafter that has a stopper.
    """
    drafter = _stopped(engine)
    begins = (getattr(engine.tokenizer, "bos_token_id", None), *engine.eos_token_ids, 0)
    prompt = [next(id_ for id_ in begins if id_ is not None and 0 <= id_ < engine.target.vocab_size)]
    watching = _Watching(min(DRAFTED, drafter.limit))
    room = max(min(TOKENS, (engine.target.max_positions or TOKENS) - 2), 1)
    params = [SamplingParams(max_tokens=room, seed=1 + row) for row in range(TEXTS)]
    engine.sibling(drafter.with_stopper(watching)).generate([prompt] * TEXTS, params)
    return watching.seen


def measured_costs(engine: DecodingLoop, rows: int = 1) -> RoundCosts:
    """Seconds of rounds without a draft, of beginning one, of a drafted token, and of what it and further drafts add.

    Some short runs with constant lengths, and with all drafts that the drafter makes, in turns.

    Args:
        engine: idle, with a drafter that has a stopper.
        rows: requests that share a round.
    """
    drafter = _stopped(engine)
    most = drafter.most
    lengths = sorted({min(length, drafter.limit) for length in LENGTHS})  # prefix trees may be less deep
    single = [(length, 1) for length in lengths]
    several = [(lengths[-1], most)] if most > 1 else []
    ways = [(0, 1), *single, *several]
    turns: list[dict[tuple[int, int], tuple[float, float]]] = []
    start = time.perf_counter()
    for repeat in range(MOST + 1):
        if repeat > REPEATS and time.perf_counter() - start > SECONDS:
            break
        turn = {way: _split(_rounds(engine, drafter, way, rows), way[0]) for way in ways}
        turns += [turn] if repeat else []  # the first one warms up
    whole = [turn for turn in turns if all(rest for _, rest in turn.values())]
    if not whole:  # nothing was drafted, say after a prompt that the draft cannot read
        target = statistics.median([sum(turn[0, 1]) for turn in turns]) or 1.0
        return RoundCosts(target, target)
    plain = [sum(turn[0, 1]) for turn in whole]
    target = statistics.median(plain)
    # Shares of the same turn's plain round: a machine that others use is now faster, now slower.
    shares = {way: [[part / of for part in turn[way]] for turn, of in zip(whole, plain, strict=True)] for way in ways}
    middle = {way: [target * statistics.median(part) for part in zip(*shares[way], strict=True)] for way in ways}
    spent = {way: (middle[way][0], middle[way][1] - target) for way in ways[1:]}
    draft = _slope(lengths, [spent[way][0] for way in single], least=0.5)
    token = _slope(lengths, [spent[way][1] for way in single], least=0.0)
    begin = max(sum(spent[single[0]]) - lengths[0] * (draft + token), 0.0)
    more = 0.0
    for way in several:
        more = max(spent[way][0] - spent[single[-1]][0], 0.0) / way[0] / (most - 1)
        token = max(token, spent[way][1] / (way[0] * most))
    return RoundCosts(target=target, draft=draft, token=token, more=more, begin=begin)


def _split(rounds: Sequence[Stats], length: int) -> tuple[float, float]:
    """Medians of what drafting takes and of the rest, in rounds with drafts of that length; zeros where there are none.

    Where nothing is drafted, being asked is a part of the rest.
    """
    full = [one.seconds for one in rounds if one.num_draft_tokens >= length]
    if not full:
        return 0.0, 0.0
    drafting = [one.draft if length else 0.0 for one in full]
    return statistics.median(drafting), statistics.median(map(sub, (one.total for one in full), drafting))


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


def _stopped(engine: DecodingLoop) -> ModelBacked:
    drafter = engine.drafter
    assert isinstance(drafter, ModelBacked), "only drafts of a model are measured: others have no stopper"
    return drafter


def _rounds(engine: DecodingLoop, drafter: ModelBacked, way: tuple[int, int], rows: int) -> list[Stats]:
    """Statistics of each round of a short run as its first request has them, without those that warm up.

    Where the context ends before that is over, without the first two only.
    """
    loop = engine.sibling(drafter.with_stopper(_Bounded(*way)))
    width = engine.target.vocab_size
    requests = []
    for row in range(rows):
        prompt = [(7919 * place + row + 1) % width for place in range(PROMPT)]
        requests += loop.add(prompt, SamplingParams(max_tokens=None, seed=1 + row, ignore_eos=True))
    first, warm = requests[0], 0
    found: list[Stats] = []
    start = time.perf_counter()
    try:
        while len(found) < warm + ROUNDS and not any(request.finished for request in requests):
            first.stats = Stats()
            loop.step()
            found.append(first.stats)
            if len(found) <= 2 or time.perf_counter() - start < WARM:
                warm = len(found)
    finally:
        for request in requests:
            loop.abort(request)
    return found[warm:] if len(found) == warm + ROUNDS else found[2:]


class _Watching(FixedLength):
    """A constant length and one draft a round; counts what is accepted.

    Args:
        length: the constant.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._first, self._later = [0, 0], [0, 0]  # tokens that were decided on, and those accepted

    def drafts(self, row: int, most: int) -> int:  # noqa: ARG002
        """One."""
        return 1

    def observe(self, row: int, drafted: int, accepted: int) -> None:  # noqa: ARG002
        """Count a round."""
        if drafted:
            self._first[0] += 1
            self._first[1] += accepted > 0
        if accepted:
            self._later[0] += min(accepted + 1, drafted) - 1
            self._later[1] += accepted - 1

    @property
    def seen(self) -> AcceptanceRates:
        """Shares of accepted tokens; 0 where none was decided on."""
        first, later = (round(accepted / max(decided, 1), 3) for decided, accepted in (self._first, self._later))
        return AcceptanceRates(first, later)


class _Bounded(FixedLength):
    """A constant length that may be 0, and a constant number of drafts."""

    def __init__(self, length: int, drafts: int) -> None:
        super().__init__(max(length, 1))
        self._wanted, self._drafts = length, drafts

    def length(self, row: int) -> int:  # noqa: ARG002
        """That length."""
        return self._wanted

    def drafts(self, row: int, most: int) -> int:  # noqa: ARG002
        """That number, as far as it can be had."""
        return min(self._drafts, most)


def _key(engine: DecodingLoop) -> str:
    """Names the models, how they are run, and the machine's threads."""
    drafter, target = _stopped(engine), engine.target
    backend = drafter.model.backend
    dtype, products = getattr(target, "dtype", ""), getattr(target, "products", "")
    names = (
        target.name,
        getattr(target, "kind", type(target).__name__),
        products,
        backend.name,
        engine.drafter.name,
        dtype,
        target.device,
    )
    return " | ".join(map(str, (_VERSION, *names, f"{torch.get_num_threads()} of {os.cpu_count()} threads")))


def _read(file: Path) -> dict[str, Any]:
    """What the file holds; nothing if it is not there or is none of ours."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: row for name, row in found.items() if isinstance(row, dict)} if isinstance(found, dict) else {}
