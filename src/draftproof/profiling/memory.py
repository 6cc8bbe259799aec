"""Memory of an engine: weights, caches, the temporaries of a round, and the measured peak of running a batch.

Weights and caches are the sums of their tensors. Temporaries are the tensors that the operations of each phase of a
round allocate. The peak is measured in a separate run without observation, and shown beside the sum of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.loading.options import parse_device
from draftproof.drafters.base import SessionDrafter
from draftproof.engine.drafter_parts import find_drafter
from draftproof.engine.engine import Engine
from draftproof.errors import UserError, refuse_below_one
from draftproof.peak import HOW, Peak
from draftproof.profiling.phases import Phases, RowShape
from draftproof.profiling.tensor_memory import TensorMemory, tensor_memory, walk
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, without_directory
from draftproof.results import Results, table
from draftproof.sampling import SamplingParams

_PERIOD = 32  # after so many tokens the prompt repeats, so that lookup drafters find something


@dataclass(frozen=True)
class Workload:
    """The batch that is run."""

    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 32

    def __post_init__(self) -> None:
        refuse_below_one(batch=self.batch, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)


@dataclass(frozen=True)
class MemoryOptions(Workload):
    """Options of `measure_memory`.

    Attributes:
        target, draft, drafter, verifier, dtype, device, backend: a composition, as in `Engine.load`.
        trust_remote_code: run code that comes with a model.
        draft_length: drafted tokens of a round.
        batch: requests decoded together.
        prompt_tokens: length of each prompt.
        new_tokens: tokens to generate for each.
    """

    target: str = "embedded:stories"
    draft: str | None = None
    drafter: str | None = None
    verifier: str | None = None
    dtype: str = "auto"
    device: str | None = None
    backend: str = "auto"
    trust_remote_code: bool = False
    draft_length: int = 4

    def load(self) -> Engine:
        """The engine, with room for the batch."""
        part, argument = find_drafter(self.drafter) if self.drafter else (None, "")
        own_length = part is not None and part.takes_length and not argument
        return Engine.load(
            self.target,
            self.draft,
            drafter=f"{self.drafter}:{self.draft_length}" if own_length else self.drafter,
            stopper=f"fixed:{self.draft_length}",
            verifier=self.verifier,
            max_batch=self.batch,
            prefix_reuse=False,  # all prompts are the same
            trust_remote_code=self.trust_remote_code,
            dtype=self.dtype,
            device=self.device,
            backend=self.backend,
        )


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights of one part, with the copies and tables made from them (fused, packed, scaled)."""

    part: str  # its name
    own: int  # bytes that it does not share with the parts before it in the list
    packed: int  # those of `own` that are in a layout for the CPU
    shared: int  # bytes that it shares with the parts before it


@dataclass(frozen=True)
class Cache:
    """The keys and values of a model."""

    part: str  # its name
    token: int  # bytes per token
    sequence: int  # bytes of the longest request of the run, with drafted tokens
    used: int  # bytes of the whole batch at that length
    taken: int  # the most that the batch took, in whole pages or as a block of equal slots
    paged: bool  # whether a slot takes pages for what its request has written; else as much as the longest request


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory as measured by the system or the accelerator; on a CPU, memory of the whole process."""

    how: str  # the method, a key of `draftproof.peak.HOW`
    before: int | None  # bytes before anything was loaded; None if the system does not report them
    loading: int  # peak while the engine was loaded
    loaded: int | None  # bytes after that
    peak: int  # peak while the batch ran


@dataclass(frozen=True)
class Memory:
    """The memory of an engine, in bytes."""

    workload: Workload  # the batch that was run
    parts: dict[str, str | None]  # drafter, stopper and rule in effect
    weights: tuple[WeightBytes, ...]  # of each part
    caches: tuple[Cache, ...]  # of each model
    states: int  # peak of the hidden states in sessions, for feature heads; they are part of `temporaries`
    recurrent: int  # peak of the states of recurrent layers in sessions, between rounds; part of `temporaries` too
    first: dict[str, int]  # peak of each phase, and of the whole round, in the round that reads the prompts
    later: dict[str, int]  # the same for the largest of the other rounds
    rows: dict[str, RowShape]  # the largest rows of logits and probabilities that a phase returned
    temporaries: int  # peak of the tensors besides weights and caches
    resident: MeasuredMemory  # as measured by the system

    @property
    def total(self) -> int:
        """Sum of weights, caches and temporaries."""
        return sum(one.own for one in self.weights) + sum(one.taken for one in self.caches) + self.temporaries

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"total": self.total}


def measure_memory(options: MemoryOptions, *, watch: Watch = silent) -> Results:  # noqa: ARG001 - as all measurements
    """Weights, caches and temporaries of an engine, and the peak of running a batch, as a report."""
    where = parse_device(options.device)
    options = replace(options, device=str(where))
    facts = run_facts(where)
    warm_up(dtype=options.dtype, device=str(where), backend=options.backend)
    found = measure(options.load, Workload(options.batch, options.prompt_tokens, options.new_tokens), where)
    lines = [*_weights(found), "", *_caches(found), "", *_round(found), "", *_measured(found)]
    small = options.draft and without_directory(options.draft)
    setup = {"target": without_directory(options.target), "draft": small}
    setup |= {"dtype": options.dtype, "device": options.device, "backend": options.backend}
    return Results("Memory", lines, {**setup, **found.to_dict()}, facts)


def measure(make: Callable[[], Engine], workload: Workload, device: torch.device) -> Memory:
    """Load an engine, run a batch for its peak, and run it again for the memory of each phase.

    `make` loads it with the workload's batch as `max_batch`, so its caches grow as in normal use. Tokens are sampled at
    temperature 1, and nothing ends a request early.
    """
    loading = Peak(device)
    engine = make()
    loading_peak = loading.stop()
    refuse_overlong(engine, workload)
    for _, cache in slot_caches(engine):
        cache.peak = 0
    running = Peak(device)
    for _ in rounds(engine, workload):
        pass
    resident = MeasuredMemory(running.how, loading.before, loading_peak, running.before, running.stop())
    phases = Phases()
    with phases.observe(engine):
        for _ in rounds(engine, workload):
            phases.end_round()
    stopper = engine.drafter.stopper
    return Memory(
        workload=workload,
        parts={
            "drafter": engine.drafter.name,
            "stopper": None if stopper is None else stopper.name,
            "verifier": engine.verifier.name,
        },
        weights=tuple(weights(engine)),
        caches=tuple(caches(engine, phases.longest, workload.batch)),
        states=phases.states,
        recurrent=phases.recurrent,
        first=phases.first,
        later=phases.later,
        rows=phases.rows,
        temporaries=phases.peak,
        resident=resident,
    )


def warm_up(*, dtype: str, device: str, backend: str) -> None:
    """Load and run a tiny pair once, so that libraries are loaded before anything is measured."""
    engine = Engine.load(
        "embedded:target",
        "embedded:draft",
        drafter="model",
        stopper="fixed:2",
        dtype=dtype,
        device=device,
        backend=backend,
    )
    for _ in rounds(engine, Workload(1, 4, 4)):
        pass


def refuse_overlong(engine: Engine, workload: Workload) -> None:
    """Refuse a workload that would end at the context instead of at its number of tokens."""
    total = workload.prompt_tokens + workload.new_tokens
    most = engine.target.max_positions
    if most is not None and total > most:
        raise UserError(
            f"prompt and new tokens: expected at most {most} together, the context of {engine.target.name}, got "
            f"{workload.prompt_tokens} and {workload.new_tokens}"
        )


def rounds(engine: Engine, workload: Workload) -> Iterator[None]:
    """Run a batch; yields after each round."""
    prompt = [1 + place % min(_PERIOD, engine.target.vocab_size - 1) for place in range(workload.prompt_tokens)]
    requests = []
    try:
        for seed in range(workload.batch):
            params = SamplingParams(max_tokens=workload.new_tokens, temperature=1.0, seed=seed, ignore_eos=True)
            requests += engine.add(prompt, params, offline=True)
        while engine.busy:
            engine.step()
            yield
    finally:
        for request in requests:
            engine.abort(request)


def weights(engine: Engine) -> Iterator[WeightBytes]:
    """Weights of the target, the draft model, the stopper's head and the other parts; every tensor counts once."""
    drafter = engine.drafter
    named: list[tuple[str, object]] = [("target", engine.target)]
    if isinstance(drafter, SessionDrafter) and drafter.backends:
        named.append(("draft", drafter.backends))
    named += [("stopper", drafter.stopper), ("other", (drafter, engine.verifier))]
    known = TensorMemory({})
    buffers = tensor_memory(*(cache for _, cache in slot_caches(engine)))
    for part, root in named:
        found = tensor_memory(root) - buffers
        own = found - known
        if own.total or part in {"target", "draft"}:
            yield WeightBytes(part, own.total, own.total_packed, (found & known).total)
        known |= found


def caches(engine: Engine, longest: dict[int, int], batch: int) -> Iterator[Cache]:
    """Every slot cache of an engine that was used; `longest`: tokens of the longest request by the id of its cache."""
    for part, cache in slot_caches(engine):
        if cache.peak:
            sequence = cache.token_nbytes * longest.get(id(cache), 0)
            yield Cache(part, cache.token_nbytes, sequence, batch * sequence, cache.peak, cache.is_paged)


def slot_caches(engine: Engine) -> Iterator[tuple[str, SlotCache]]:
    """Every slot cache, the target's first; a draft model that shares the target's has none of its own."""
    for path, item in walk(engine):
        if isinstance(item, SlotCache):
            yield "target" if path.startswith(".target") else "draft", item


# --- the report ------------------------------------------------------------------------------------------------------


def _weights(found: Memory) -> list[str]:
    rows = [(one.part, *map(format_bytes, (one.own, one.packed, one.shared))) for one in found.weights]
    return table(("weights", "own", "of these packed", "shared with the parts above"), rows)


def _caches(found: Memory) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for one in found.caches:
        sizes = map(format_bytes, (one.token, one.sequence, one.used, one.taken))
        rows.append((one.part, *sizes, "what each wrote" if one.paged else "as much as the longest"))
    for name, size in (("states for the head", found.states), ("recurrent states", found.recurrent)):
        if size:
            rows.append((name, "", "", format_bytes(size), "", ""))
    heads = ("keys and values", "per token", "longest request", "whole batch", "taken", "by each request")
    return table(heads, rows)


def _round(found: Memory) -> list[str]:
    rows = []
    for phase, first in found.first.items():
        largest = found.rows.get(phase)
        shown = (
            ("", "") if largest is None else (format_bytes(largest.nbytes), f"{list(largest.shape)} {largest.dtype}")
        )
        rows.append((phase, format_bytes(first), format_bytes(found.later[phase]), *shown))
    return table(("peak in a round", "first", "later", "rows returned", "shape"), rows)


def _measured(found: Memory) -> list[str]:
    measured, load = found.resident, found.workload
    parts = ", ".join(f"{kind} {name}" for kind, name in found.parts.items() if name)
    each = f"{load.prompt_tokens} prompt tokens and {load.new_tokens} new ones each"
    lines = [f"Sum of the parts: {format_bytes(found.total)}, for a batch of {load.batch}, {each}; {parts}.", ""]
    if measured.before is not None and measured.loaded is not None:
        running, loaded, loading = (
            format_bytes(size - measured.before) for size in (measured.peak, measured.loaded, measured.loading)
        )
        lines.append(
            f"Measured: peak {running} while running, {loaded} when loaded, peak {loading} while loading, all beyond "
            f"the {format_bytes(measured.before)} before loading."
        )
    else:
        lines.append(f"Measured: peak {format_bytes(measured.peak)} while running.")
    return [*lines, f"Measured are {HOW[measured.how]}."]


def format_bytes(size: int) -> str:
    """Bytes in decimal units, to three digits."""
    if abs(size) < 1000:
        return f"{size} B"
    amount, unit = float(size), "B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007 - the last one is needed
        amount /= 1000
        if abs(amount) < 999.5:
            break
    return f"{amount:.3g} {unit}" if abs(amount) < 99.95 else f"{amount:.0f} {unit}"
