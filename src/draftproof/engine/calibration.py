"""Calibration of a pair of models: the time of rounds and the acceptance rates, measured once and kept in a file.

The same file gives the same figures, so later runs on this machine answer a request with a seed in the same way.
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
WARM = 0.03  # seconds until rounds of one kind have their final speed; at least two rounds
SECONDS, MOST = 3.0, 60  # small models need many repeats: their rounds are so short that noise lasts longer than three
LENGTHS = (2, 8)  # draft lengths, for a line through two points
TEXTS, TOKENS, DRAFTED = 16, 48, 4  # for acceptance: about 400 rounds, a standard error of 0.03
_VERSION = 6
_Kept = TypeVar("_Kept", RoundCosts, AcceptanceRates)
_log = logging.getLogger(__name__)


def known_costs(engine: DecodingLoop, file: Path) -> BatchCosts:
    """The costs of an engine's rounds for one request and for a full batch: from the file, or measured.

    Args:
        engine: with a drafter that has a stopper.
        file: JSON, with the figures of other pairs too. If it cannot be written, there is a warning, and the costs are
            kept for this engine only.
    """
    sizes = tuple(dict.fromkeys((1, engine.max_batch)))

    def of(rows: int) -> RoundCosts:
        return _known(engine, file, f"batch {rows}", RoundCosts, lambda each: measured_costs(each, rows))

    return BatchCosts(sizes, tuple(map(of, sizes)))


def known_acceptance(engine: DecodingLoop, file: Path) -> AcceptanceRates:
    """Acceptance rates of drafted tokens in texts that the target begins by itself: from the file, or measured.

    Args:
        engine: see `known_costs`.
        file: see `known_costs`.
    """
    model = _stopped(engine).model
    drawn = f"{_fingerprint(model.backend)} {model.changes}"
    what = f"accepted | {engine.verifier.name} | {_fingerprint(engine.target)} | {drawn}"
    return _known(engine, file, what, AcceptanceRates, measured_acceptance)


def _fingerprint(backend: Backend) -> str:
    """A number that distinguishes weights with the same name: the norm of the logits after one token."""
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
    """Acceptance rates of first tokens and of tokens after an accepted one, in short drafts at temperature 1.

    The texts begin at the tokenizer's first token, so they are texts that the target writes by itself; with other
    prompts the rates may be higher or lower.

    Args:
        engine: idle, with a drafter that has a stopper.
    """
    drafter = _stopped(engine)
    begins = (getattr(engine.tokenizer, "bos_token_id", None), *engine.eos_token_ids, 0)
    prompt = [next(id_ for id_ in begins if id_ is not None and 0 <= id_ < engine.target.vocab_size)]
    counter = _AcceptanceCounter(min(DRAFTED, drafter.limit))
    tokens = max(min(TOKENS, (engine.target.max_positions or TOKENS) - 2), 1)
    params = [SamplingParams(max_tokens=tokens, seed=1 + row) for row in range(TEXTS)]
    engine.sibling(drafter.with_stopper(counter)).generate([prompt] * TEXTS, params)
    return counter.rates


def measured_costs(engine: DecodingLoop, rows: int = 1) -> RoundCosts:
    """The cost of a round, from short runs in turns: without drafts, with constant lengths, with several drafts.

    Args:
        engine: idle, with a drafter that has a stopper.
        rows: requests that share a round.
    """
    drafter = _stopped(engine)
    most = drafter.most
    lengths = sorted({min(length, drafter.limit) for length in LENGTHS})  # prefix trees may be less deep
    single = [(length, 1) for length in lengths]
    several = [(lengths[-1], most)] if most > 1 else []
    shapes = [(0, 1), *single, *several]
    turns: list[dict[tuple[int, int], tuple[float, float]]] = []
    start = time.perf_counter()
    for repeat in range(MOST + 1):
        if repeat > REPEATS and time.perf_counter() - start > SECONDS:
            break
        turn = {shape: _split(_rounds(engine, drafter, shape, rows), shape[0]) for shape in shapes}
        turns += [turn] if repeat else []  # the first one warms up
    whole = [turn for turn in turns if all(rest for _, rest in turn.values())]
    if not whole:  # nothing was drafted, for example after a prompt that the draft model cannot read
        target = statistics.median([sum(turn[0, 1]) for turn in turns]) or 1.0
        return RoundCosts(target, target)
    plain = [sum(turn[0, 1]) for turn in whole]
    target = statistics.median(plain)
    # Times are divided by the plain round of the same turn, because the speed of a shared machine varies.
    spent = {}
    for shape in shapes[1:]:
        shares = [[part / of for part in turn[shape]] for turn, of in zip(whole, plain, strict=True)]
        drafting, rest = (target * statistics.median(part) for part in zip(*shares, strict=True))
        spent[shape] = drafting, rest - target
    draft = _slope(lengths, [spent[shape][0] for shape in single], least=0.5)
    token = _slope(lengths, [spent[shape][1] for shape in single], least=0.0)
    begin = max(sum(spent[single[0]]) - lengths[0] * (draft + token), 0.0)
    more = 0.0
    for shape in several:
        more = max(spent[shape][0] - spent[single[-1]][0], 0.0) / shape[0] / (most - 1)
        token = max(token, spent[shape][1] / (shape[0] * most))
    return RoundCosts(target=target, draft=draft, token=token, more=more, begin=begin)


def _split(rounds: Sequence[Stats], length: int) -> tuple[float, float]:
    """Median seconds of drafting and of the rest, in rounds with drafts of that length; zeros if there are none.

    At length 0, the drafter's call is a part of the rest.
    """
    full = [one.seconds for one in rounds if one.num_draft_tokens >= length]
    if not full:
        return 0.0, 0.0
    drafting = [one.draft if length else 0.0 for one in full]
    return statistics.median(drafting), statistics.median(map(sub, (one.total for one in full), drafting))


def _slope(lengths: Sequence[int], seconds: Sequence[float], *, least: float) -> float:
    """Seconds of one more token, between the shortest draft and the longest.

    Args:
        lengths: of drafts.
        seconds: of a round with each.
        least: noise is limited: the result is at least this share of the longest draft's seconds per token, and at
            most all of them.
    """
    whole = max(seconds[-1] / lengths[-1], 0.0)
    if len(lengths) == 1:
        return whole
    return min(max((seconds[-1] - seconds[0]) / (lengths[-1] - lengths[0]), least * whole), whole)


def _stopped(engine: DecodingLoop) -> ModelBacked:
    drafter = engine.drafter
    assert isinstance(drafter, ModelBacked), "only drafts of a model are measured: others have no stopper"
    return drafter


def _rounds(engine: DecodingLoop, drafter: ModelBacked, shape: tuple[int, int], rows: int) -> list[Stats]:
    """Statistics of the first request in each round of a short run, without the rounds that warm up.

    If the context ends before the warm-up, only the first two rounds are left out.
    """
    loop = engine.sibling(drafter.with_stopper(_ConstantShape(*shape)))
    loop.waits = True
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


class _AcceptanceCounter(FixedLength):
    """A constant length and one draft a round; counts the accepted tokens.

    Args:
        length: number of drafted tokens.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._first, self._later = [0, 0], [0, 0]  # verified tokens, and accepted ones

    def drafts(self, row: int, most: int) -> int:  # noqa: ARG002
        """Always 1."""
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
    def rates(self) -> AcceptanceRates:
        """Shares of accepted tokens; 0 if none was verified."""
        first, later = (round(accepted / max(verified, 1), 3) for verified, accepted in (self._first, self._later))
        return AcceptanceRates(first, later)


class _ConstantShape(FixedLength):
    """A constant length, which may be 0, and a constant number of drafts."""

    def __init__(self, length: int, drafts: int) -> None:
        super().__init__(max(length, 1))
        self._length, self._drafts = length, drafts

    def length(self, row: int) -> int:  # noqa: ARG002
        """The constant length."""
        return self._length

    def drafts(self, row: int, most: int) -> int:  # noqa: ARG002
        """The constant number, or `most` if that is less."""
        return min(self._drafts, most)


def _key(engine: DecodingLoop) -> str:
    """A key in the file: the models, their types, the device, and the machine's threads."""
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
    """The content of the file; empty if it does not exist or has another form."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: row for name, row in found.items() if isinstance(row, dict)} if isinstance(found, dict) else {}
