"""A target over several processes, each with a part of its weights: transformers' tensor parallelism.

Process 0 has the engine: it drafts, verifies, draws and measures time, as it does alone. The others follow: they
compute the same forward passes on their parts of the weights, keys and values, in the order in which process 0 sends
them. So no decision is taken twice, and no two processes can take different ones.

A pass is sent as its tokens and their slots, with what happened to the slots since the last one. The processes are
started and watched by torch.distributed's launcher; the sums over them are transformers' own.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.backends.base import Feed
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.hf.backend import HFBackend
from draftproof.errors import UserError, reason
from draftproof.tree import TokenTree

_LONG = timedelta(days=3650)  # a server may have nothing to do for long; a process that ends is noticed at once
_HEADS = ("num_attention_heads", "num_key_value_heads")
_log = logging.getLogger(__name__)

Change = tuple[str, tuple[Any, ...]]  # a method of a slot cache, and its arguments


@dataclass(frozen=True)
class Load:
    """A model that all processes load."""

    source: str
    options: Any  # as of `load_backend`


@dataclass(frozen=True)
class FeedRow:
    """A feed without its session."""

    slot: int
    length: int
    tail: tuple[int, ...]
    chain: tuple[int, ...]
    nodes: tuple[int, ...] | None = None
    parents: tuple[int, ...] = ()
    known: int = 0

    @classmethod
    def of(cls, feed: Feed) -> FeedRow:
        """Of a feed."""
        session, tree = feed.session, feed.tree
        assert isinstance(session, SlotSession), "checked by SlotBackend.forward"
        chain = feed.tokens.tolist() if isinstance(feed.tokens, Tensor) else feed.tokens
        known = cls(session.slot, session.length, session.tail, tuple(chain))
        return known if tree is None else replace(known, nodes=tree.ids, parents=tree.parents, known=tree.known)

    def feed(self, cache: SlotCache) -> Feed:
        """A feed of these tokens to a session like the one that they came from."""
        tree = None
        if self.nodes is not None:
            tree = TokenTree(torch.tensor(self.nodes, dtype=torch.int64), self.parents, self.known)
        return Feed(_FollowedSession(cache, self), list(self.chain), tree)


class _FollowedSession(SlotSession):
    """What a layout reads of a session of process 0."""

    def __init__(self, cache: SlotCache, row: FeedRow) -> None:
        self.cache = cache
        self._is_lent = True
        self.slot = row.slot
        self._length = row.length
        self._parents = list(row.tail)


@dataclass(frozen=True)
class ParallelPass:
    """A forward pass."""

    backend: int
    changes: Sequence[tuple[int, Change]]  # of each model's slots since the last pass
    rows: Sequence[FeedRow]


@dataclass
class ProcessGroup:
    """The processes that share models."""

    size: int
    rank: int
    control: Any
    backends: list[TensorParallelBackend] = field(default_factory=list)  # models in the order in which they were loaded
    # of slots since the last pass, by number of the model
    changes: list[tuple[int, Change]] = field(default_factory=list)
    # held while a pass is computed: passes of several models take turns
    lock: threading.RLock = field(default_factory=threading.RLock)
    lost: str = ""  # why it cannot be used any more

    @property
    def leads(self) -> bool:
        """Whether this process is the one that has the engine."""
        return self.rank == 0

    def send(self, message: Load | ParallelPass | None) -> None:
        """Tell the other processes what to do; None ends them."""
        torch.distributed.broadcast_object_list([message], src=0, group=self.control)

    def load(self, source: str, options: Any, load: Callable[..., Any]) -> TensorParallelBackend:
        """Load a model together."""
        with self.lock, self._whole():
            self.send(Load(source, options))
            said = self._load(load, source, options)
        if said:
            raise UserError(said)
        return self.backends[-1]

    def _load(self, load: Callable[..., Any], source: str, options: Any) -> str:
        """Load this process's part; returns the first error that some process has."""
        made: list[Any] = []

        def attempt(step: Callable[[], Any]) -> str:
            try:
                made.append(step())
            except UserError as error:
                return self._first(str(error))
            return self._first("")

        said = attempt(lambda: load(source, options))
        if not said:  # all check the model at once, as its passes need all of them
            said = attempt(lambda: TensorParallelBackend(made[0], self, name=source))
        if not said:
            self.backends.append(made[1])
        return said

    def _first(self, said: str) -> str:
        every: list[str] = [""] * self.size
        torch.distributed.all_gather_object(every, said, group=self.control)
        return next(filter(None, every), "")

    @contextmanager
    def passing(self, backend: TensorParallelBackend, layout: Layout) -> Iterator[None]:
        """Let the others compute a pass of this layout, while this process computes its part."""
        with self.lock, self._whole():
            changes = self.changes
            self.changes = []
            self.send(ParallelPass(self.backends.index(backend), changes, [FeedRow.of(feed) for feed in layout.feeds]))
            yield

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Something that all processes do together: where one cannot go on, none can.

        Raises:
            UserError: some process is gone, now or since an earlier call.
        """
        if self.lost:
            raise UserError(self.lost)
        try:
            yield
        except BaseException as error:
            why = "one of them has ended" if _is_of_connection(error) else f"this one failed: {reason(error)}"
            self.lost = f"the {self.size} processes of the model no longer work together ({why}): start again"
            self._leave()  # those that wait for this one notice
            if isinstance(error, Exception):
                raise UserError(self.lost) from error
            raise

    def follow(self, load: Callable[..., Any]) -> None:
        """Do what process 0 says, until it ends.

        Raises:
            SystemExit: process 0 has ended without a word; the launcher says so.
            UserError: this process has failed.
        """
        for number in (signal.SIGINT, signal.SIGTERM):  # process 0 decides when to end
            signal.signal(number, signal.SIG_IGN)
        try:
            while (message := self._received()) is not None:
                self._do(message, load)
        except Exception as error:
            if _is_of_connection(error):
                raise SystemExit(1) from error
            raise UserError(f"process {self.rank} of {self.size} cannot go on: {reason(error)}") from error
        self._part()

    def _received(self) -> Load | ParallelPass | None:
        message: list[Load | ParallelPass | None] = [None]
        torch.distributed.broadcast_object_list(message, src=0, group=self.control)
        return message[0]

    def _do(self, message: Load | ParallelPass, load: Callable[..., Any]) -> None:
        if isinstance(message, Load):
            self._load(load, message.source, message.options)  # an error is raised in process 0
            return
        for number, (name, arguments) in message.changes:
            getattr(self.backends[number].cache, name)(*arguments)
        self.backends[message.backend].repeat(message.rows)

    def end(self) -> None:
        """End the other processes."""
        if not self.lost:
            with self.lock:
                self.lost = "the processes of the model have ended"
                try:
                    self.send(None)
                    self._part()
                except RuntimeError as error:
                    _log.info("a process was gone before the end: %s", reason(error))
                    self._leave()

    def _part(self) -> None:
        """Leave together: a process whose group is taken apart while another still talks to it is aborted."""
        torch.distributed.barrier(group=self.control)
        self._leave()

    def _leave(self) -> None:
        self.control = None  # the last reference: its threads must have ended before the interpreter does
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _is_of_connection(error: BaseException) -> bool:
    """Whether an error says that another process is gone; gloo's are plain RuntimeErrors."""
    said = str(error)
    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in said)


def is_launched() -> bool:
    """Whether torch.distributed's launcher has started this process."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def join(size: int) -> ProcessGroup:
    """This process's place among those that the launcher started.

    Raises:
        UserError: they were not started, or there are more or fewer of them.
    """
    if size < 2:
        raise UserError(f"tensor_parallel: expected 1 (one process) or more, got {size}")
    if not is_launched():
        raise UserError(
            f"tensor_parallel is {size}, which needs {size} processes, and this one was started alone: start the "
            f"program by torchrun --nproc-per-node {size} PROGRAM (the command line does that by itself)"
        )
    started = int(os.environ["WORLD_SIZE"])
    if started != size:
        raise UserError(f"tensor_parallel is {size}, and {started} processes were started: both must be the same")
    return _joined(size)


@functools.cache
def _joined(size: int) -> ProcessGroup:
    device = _device()
    kinds = {"cpu": "gloo", device.type: torch.distributed.get_default_backend_for_device(device)}
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    torch.distributed.init_process_group(",".join(f"{kind}:{backend}" for kind, backend in kinds.items()))
    group = ProcessGroup(size, torch.distributed.get_rank(), torch.distributed.new_group(backend="gloo", timeout=_LONG))
    if group.leads:
        atexit.register(group.end)
    return group


def _device() -> torch.device:
    """The device of this process's part: its own accelerator, where there are any."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return torch.device("cpu")
    place, there = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if place >= there:
        raise UserError(
            f"process {place} of this machine needs a {found.type} device of its own, and there are {there}: start at "
            f"most {there} processes on each machine"
        )
    return torch.device(found.type, place)


def refuse_indivisible(config: Any, size: int, name: str) -> None:
    """Refuse a model that transformers cannot divide among so many processes."""
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise UserError(
            f"{name} cannot be divided among processes: transformers has no tensor-parallel plan for its type "
            f"({text.model_type}); use tensor_parallel 1, or device auto, which puts whole layers on each device"
        )
    heads = {each: found for each in _HEADS if isinstance(found := getattr(text, each, None), int)}
    wrong = {each: number for each, number in heads.items() if number % size}
    if wrong:
        legal = [str(n) for n in range(1, min(heads.values()) + 1) if all(not number % n for number in heads.values())]
        shown = " and ".join(f"{each} {number}" for each, number in wrong.items())
        raise UserError(
            f"tensor_parallel: expected one of {', '.join(legal)}, got {size}: {name} has {shown}, which must be "
            "multiples of it"
        )


class ParallelCache(SlotCache):
    """The slot cache of one process's heads; what happens to slots between passes is noted for the others."""

    def __init__(self, note: Callable[[Change], None]) -> None:
        super().__init__()
        self._note_change = note
        for name in ("acquire", "release", "trim", "copy", "gather"):
            setattr(self, name, partial(self._changed, name, getattr(self, name)))

    def _changed(self, name: str, change: Callable[..., Any], *arguments: Any) -> Any:
        made = change(*arguments)
        self._note_change((name, arguments))
        return made


class TensorParallelBackend(HFBackend):
    """One process's part of a transformers model, which computes passes together with the other parts.

    Drafters that read the target's own weights or states are refused: they would need passes of their own.
    """

    whole_keys = False

    def __init__(self, model: Any, group: ProcessGroup, *, name: str) -> None:
        self._group = group
        self._number = len(group.backends)
        self._is_ready = False
        super().__init__(model, name=name, cache=ParallelCache(self._note))
        if self._switch is not None:
            raise UserError(
                f"{name} reads long texts with other rotary factors (longrope), which is not divided among processes: "
                "use tensor_parallel 1"
            )
        self.capabilities = replace(self.capabilities, hidden=0)
        self.embed = self._refuse_embedding
        self._is_ready = True

    @property
    def products(self) -> str:
        """What its times depend on, beside the device."""
        return f"{self._group.size} processes"

    def _note(self, change: Change) -> None:
        if self._is_ready and self._group.leads:
            self._group.changes.append((self._number, change))

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        if not self._is_ready:  # all processes check the model at the same time
            return super()._compute(layout, hidden=hidden)
        with self._group.passing(self, layout):
            return super()._compute(layout, hidden=hidden)

    @torch.inference_mode()
    def repeat(self, rows: Sequence[FeedRow]) -> None:
        """Compute this process's part of a pass of process 0."""
        layout = Layout([row.feed(self._cache) for row in rows], self.device)
        self._cache.claim(layout.plan.slots, layout.plan.ends)
        super()._compute(layout, hidden=False)

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{self.name} is divided among {self._group.size} processes, so {what}: use drafter model, chains, tree, "
            "ngram, suffix, auto or none"
        )

    def _refuse_embedding(self, _: Tensor) -> Tensor:
        self._refuse("no head can read its embedding")

    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:  # noqa: ARG002
        """Refused."""
        self._refuse("no head can read its output layer")

    def first_layers(self, layers: int) -> HFBackend:  # noqa: ARG002
        """Refused."""
        self._refuse("its first layers cannot draft")

    def quantizing(self, bits: int) -> Iterator[HFBackend | None]:  # noqa: ARG002
        """Refused."""
        self._refuse("it has no quantized twin")

    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> HFBackend:  # noqa: ARG002
        """Refused."""
        raise UserError(f"the weights of {self.name} cannot be changed while {self._group.size} processes share them")
