"""What an engine holds and needs: weights, caches, the temporaries of a round, and the peak of really running a batch.

Weights and caches are added up from the tensors that are there. Temporaries are what the operations of each phase of a
round made and held at once. The peak is taken in a run of its own, which nothing else looks into, and stands beside the
sum of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftproof.backends.slot_cache import SlotCache
from draftproof.engine.engine import Engine
from draftproof.errors import UserError
from draftproof.profiling.peak import Peak
from draftproof.profiling.phases import Phases, RowShape
from draftproof.profiling.tensor_memory import Held, held, walk
from draftproof.sampling import SamplingParams

_PERIOD = 32  # the prompt repeats itself, so that drafters that look things up find something


@dataclass(frozen=True)
class Load:
    """What is run.

    Attributes:
        batch: sequences decoded together.
        prompt_tokens: of each.
        new_tokens: of each.

    Raises:
        UserError: a number below 1.
    """

    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise UserError(f"{name.replace('_', ' ')} is {value}: legal is 1 or more")


@dataclass(frozen=True)
class Weights:
    """The weights of one part, with what was made from them: fused, packed and scaled copies, tables.

    Attributes:
        part: whose.
        own: bytes that no part named before it holds.
        packed: of `own`, in a layout for the CPU.
        shared: bytes it holds together with parts named before it.
    """

    part: str
    own: int
    packed: int
    shared: int


@dataclass(frozen=True)
class Cache:
    """The keys and values of a model.

    Attributes:
        part: whose.
        token: bytes a token.
        sequence: bytes of the longest sequence of the run, drafted tokens included.
        used: bytes of the whole batch at that length.
        slots, positions: what there is room for after the run.
        reserved: bytes of that room.
    """

    part: str
    token: int
    sequence: int
    used: int
    slots: int
    positions: int
    reserved: int


@dataclass(frozen=True)
class Resident:
    """Memory as the system or the accelerator counts it; for a CPU that is the whole process.

    Attributes:
        how: a key of `draftproof.profiling.peak.HOW`.
        before: bytes before anything was loaded; None where the system does not say.
        loading: at most while the engine was loaded.
        loaded: after that.
        peak: at most while the batch ran.
    """

    how: str
    before: int | None
    loading: int
    loaded: int | None
    peak: int


@dataclass(frozen=True)
class Memory:
    """What was found, in bytes.

    Attributes:
        load: what was run.
        parts: drafter, stopper and rule in effect.
        weights: of each part.
        caches: of each model.
        states: last hidden states that sessions held at most, for feature heads; among `temporaries`.
        first: what the phases of the round that reads the prompts take, and the whole round.
        later: the same of the largest of the other rounds.
        rows: the largest rows of logits and probabilities that a round handed on, by phase.
        temporaries: tensors that were there at once beside weights and caches, at most.
        resident: what the process or the accelerator held.
    """

    load: Load
    parts: dict[str, str | None]
    weights: tuple[Weights, ...]
    caches: tuple[Cache, ...]
    states: int
    first: dict[str, int]
    later: dict[str, int]
    rows: dict[str, RowShape]
    temporaries: int
    resident: Resident

    @property
    def total(self) -> int:
        """Sum of the parts: weights, caches as reserved, temporaries."""
        return sum(one.own for one in self.weights) + sum(one.reserved for one in self.caches) + self.temporaries

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"total": self.total}


def measure(make: Callable[[], Engine], load: Load, device: torch.device) -> Memory:
    """Load an engine, run a batch for its peak and once more for what each phase takes, and add up what there is.

    Args:
        make: loads it afresh, so that its caches grow in the run as they would in use; `max_batch` is the load's batch.
        load: what to run; tokens are sampled at temperature 1, and nothing ends a sequence early.
        device: where the engine's models will be.

    Raises:
        UserError: from loading; prompt and new tokens that are longer than the target's context.
    """
    loading = Peak(device)
    engine = make()
    most = loading.stop()
    refuse_overlong(engine, load)
    running = Peak(device)
    for _ in rounds(engine, load):
        pass
    resident = Resident(running.how, loading.before, most, running.before, running.stop())
    phases = Phases()
    with phases.watching(engine):
        for _ in rounds(engine, load):
            phases.end_round()
    stopper = getattr(engine.drafter, "stopper", None)
    return Memory(
        load=load,
        parts={
            "drafter": engine.drafter.name,
            "stopper": None if stopper is None else stopper.name,
            "verifier": engine.verifier.name,
        },
        weights=tuple(weights(engine)),
        caches=tuple(caches(engine, phases.longest, load.batch)),
        states=phases.states,
        first=phases.first,
        later=phases.later,
        rows=phases.rows,
        temporaries=phases.most,
        resident=resident,
    )


def warm_up(*, dtype: str, device: str, backend: str) -> None:
    """Load and run a tiny pair once, so that libraries and their code are there before anything is measured.

    Raises:
        UserError: a dtype, device or backend that is none.
    """
    engine = Engine.load(
        "embedded:target", "embedded:draft", stopper="fixed:2", dtype=dtype, device=device, backend=backend
    )
    for _ in rounds(engine, Load(1, 4, 4)):
        pass


def refuse_overlong(engine: Engine, load: Load) -> None:
    """Refuse a load that would end at the context instead of at its number of tokens.

    Raises:
        UserError: with what fits.
    """
    most = engine.target.max_positions
    if most is not None and load.prompt_tokens + load.new_tokens > most:
        raise UserError(
            f"{load.prompt_tokens} prompt tokens and {load.new_tokens} new ones are "
            f"{load.prompt_tokens + load.new_tokens}: legal are {most} together, the context of {engine.target.name}"
        )


def rounds(engine: Engine, load: Load) -> Iterator[None]:
    """Run a batch; a turn for each round."""
    prompt = [1 + place % min(_PERIOD, engine.target.vocab_size - 1) for place in range(load.prompt_tokens)]
    asked = []
    try:
        for seed in range(load.batch):
            params = SamplingParams(max_tokens=load.new_tokens, temperature=1.0, seed=seed, ignore_eos=True)
            asked += engine.add(prompt, params)
        while engine.busy:
            engine.step()
            yield
    finally:
        for sequence in asked:
            engine.abort(sequence)


def weights(engine: Engine) -> Iterator[Weights]:
    """Bytes of the target, the draft model, the stopper's head and whatever else the parts hold; each once."""
    drafter = engine.drafter
    named: list[tuple[str, object]] = [("target", engine.target)]
    model = getattr(drafter, "model", None)
    if model is not None:
        named.append(("draft", model))
    named += [("stopper", getattr(drafter, "stopper", None)), ("other", (drafter, engine.verifier))]
    known = Held({})
    buffers = held(*(cache for _, cache in slot_caches(engine)))
    for part, root in named:
        found = held(root) - buffers
        own = found - known
        if own.total or part in {"target", "draft"}:
            yield Weights(part, own.total, own.total_packed, (found & known).total)
        known |= found


def caches(engine: Engine, longest: dict[int, int], batch: int) -> Iterator[Cache]:
    """Every slot cache of an engine that was used.

    Args:
        engine: after a run.
        longest: slots of the longest sequence by the id of its cache.
        batch: sequences that ran together.
    """
    for part, cache in slot_caches(engine):
        if cache.nbytes:
            slots, positions = cache.shape
            sequence = cache.token_nbytes * longest.get(id(cache), 0)
            yield Cache(part, cache.token_nbytes, sequence, batch * sequence, slots, positions, cache.nbytes)


def slot_caches(engine: Engine) -> Iterator[tuple[str, SlotCache]]:
    """Every slot cache, the target's first; a draft that shares the target's has none of its own."""
    for path, item in walk(engine):
        if isinstance(item, SlotCache):
            yield "target" if path.startswith(".target") else "draft", item
