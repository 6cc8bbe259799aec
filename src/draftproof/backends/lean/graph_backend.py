"""The lean forward on CUDA: the launches of its layers are recorded for each shape, and started by one call.

The layers of a model are hundreds of launches for each token, and the host needs several times as long for them as the
device for their work. Rows that are not neighbours in the cache are gathered. Wide passes (prompts) are launched one
operation after another, as `LeanForward` does it. On machines without a device the tests record and replay on the CPU.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from typing_extensions import override

from draftproof.accelerator import to_device
from draftproof.backends.base import Feed
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.lean.attention import Pass, SlotSpan
from draftproof.backends.lean.backend import LeanBackend, LeanForward
from draftproof.backends.lean.layers import Lean
from draftproof.backends.model_info import ModelInfo, input_device
from draftproof.errors import UserError, reason

WIDEST = 64  # most tokens of a row whose pass is recorded, fewer than Layer folds; longer ones are bound by arithmetic
_BUCKET = 256  # a graph serves this many horizons
MOST = 64  # graphs kept; the one that was used least recently is dropped
_SEEN = 256  # sets that came once
_WARM_UP = 2  # calls before a recording: libraries set themselves up in the first ones, which a recording cannot hold

Run = Callable[[Mapping[str, Tensor], Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
_log = logging.getLogger(__name__)


class GraphForward(LeanForward):
    """A lean forward on CUDA, such as that of a model's first layers, whose narrow passes are recorded."""

    kind = "graphs"

    def __init__(self, facts: ModelInfo, lean: Lean, *, cache: SlotCache | None = None) -> None:
        super().__init__(facts, lean, cache=cache)
        self._cache.pinned = True
        # by the layers whose states are taken, and whether rows are neighbours in the cache
        self._graphs: dict[tuple[tuple[int, ...], bool], Graphs] = {}

    @override
    def around(self, facts: ModelInfo, lean: Lean, cache: SlotCache | None = None) -> LeanForward:
        return forward_of(facts, lean, cache)

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        made = self._replayed(layout) if layout.width <= WIDEST else None
        if made is None:
            return super()._compute(layout, hidden=hidden)
        logits, states = made
        return logits, states if hidden else None

    def _replayed(self, layout: Layout) -> tuple[Tensor, Tensor] | None:
        """Logits and states of every column, [rows, width, ...]; None where the cache has no buffers yet.

        States of `layout.layers` go to `layout.taken`. Padding is computed and written like any token, to positions
        that are overwritten before they are read.
        """
        plan, device = layout.plan, layout.device
        rows, width = layout.ids.shape
        horizon = -(-plan.horizon // _BUCKET) * _BUCKET
        self._cache.claim(plan.slots, [base + width for base in plan.bases])
        self._cache.reserve(horizon)
        neighbours = plan.contiguous
        views = self._cache.views(plan.slots[0], rows) if neighbours else self._cache.views()
        if views is None:
            return None
        places = (to_device(plan.bases, device).unsqueeze(1) + torch.arange(width, device=device)).flatten()
        ids, positions = (part.flatten().contiguous() for part in (layout.ids, layout.positions))
        cos, sin = self.lean.rope(positions, plan.horizon)
        own = torch.arange(rows, device=device) if neighbours else to_device(plan.slots, device)
        given = {"ids": ids, "cos": cos, "sin": sin, "slots": own.repeat_interleave(width), "places": places}
        given |= {kind: self._mask(layout, window, horizon) for kind, window in self.lean.windows.now().items()}
        key = layout.layers, neighbours
        if key not in self._graphs:
            self._graphs[key] = Graphs(_pass_of(self.lean, layout.layers, neighbours=neighbours))
        logits, states, *taken = (each.view(rows, width, -1) for each in self._graphs[key](given, *views))
        layout.taken.update(zip(layout.layers, taken, strict=True))
        return logits, states

    def _mask(self, layout: Layout, window: int | None, horizon: int) -> Tensor:
        dtype = self.dtype
        mask = layout.mask(window, dtype).repeat_interleave(self.lean.layers[0].heads.group, 2)
        return F.pad(mask, (0, horizon - mask.shape[-1]), value=torch.finfo(dtype).min)


def forward_of(facts: ModelInfo, lean: Lean, cache: SlotCache | None = None) -> LeanForward:
    """The fastest backend for a lean forward; arguments as of LeanForward."""
    kind = GraphForward if lean.embed.weight.device.type == "cuda" else LeanForward
    return kind(facts, lean, cache=cache)


class GraphBackend(LeanBackend, GraphForward):
    """A transformers model whose lean forward is recorded.

    Where CUDA cannot record it, a warning says so, and it works as backend lean does.
    """

    def __init__(self, model: Any, *, name: str | None = None, check: bool = True) -> None:
        device = input_device(model)
        if device.type != "cuda":
            raise UserError(
                f"backend {self.kind} records passes on CUDA, and the model is on {device}: use lean or auto"
            )
        super().__init__(model, name=name, check=check, pack=False)
        self._record_a_short_pass()

    def _record_a_short_pass(self) -> None:
        """Record the pass of a short request now, so that the first one need not wait."""
        start, session = time.perf_counter(), self.open()
        try:
            self.forward([Feed(session, [0])])  # nothing is cached yet: by the lean forward
            for _ in range(2):  # a shape is recorded when it comes again
                self.forward([Feed(session, [0, 0])])
        finally:
            session.close()
        _log.info("recorded in %.0f s", time.perf_counter() - start)


def _pass_of(lean: Lean, layers: tuple[int, ...], *, neighbours: bool) -> Run:
    """The layers as a function of tensors only: logits, last states, and the states after some layers.

    Masks have the names of their kinds. Keys and values are those of the rows, or where these are not neighbours of all
    slots.
    """

    def run(given: Mapping[str, Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ids, slots = given["ids"], given["slots"]
        rows, _, _, horizon = given[lean.layers[0].kind].shape
        read = None if neighbours else slots.view(rows, -1)[:, 0]
        buffers = SlotSpan(keys, values, slots, given["places"], horizon, read)
        at = Pass(rows, ids.shape[0] // rows, given["cos"], given["sin"], buffers, None)
        x = lean.enter(ids)
        taken = [x.clone()] if 0 in layers else []  # clones: layers may overwrite x
        for number, layer in enumerate(lean.layers, 1):
            x = layer(x, at, given[layer.kind])
            if number in layers:
                taken.append(x.clone())
        states = lean.norm(x)
        return lean.logits(states), states, *taken

    return run


# --- recordings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Graph:
    """A recording."""

    inputs: Mapping[str, Tensor]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


class Graphs:
    """A function of tensors as CUDA graphs, one for each set of shapes and of buffers.

    A set is recorded when it comes for the second time: recording takes as long as several runs, and prompts have many
    lengths.

    Args:
        run: takes tensors by name, keys and values. It may write to keys and values only, the same whenever it is
            repeated, and may not wait for the device.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kept: OrderedDict[object, _Graph] = OrderedDict()
        self._numbers: dict[object, int] = {}  # of each set of buffers: comparing one with another takes long
        self._latest: tuple[Sequence[Tensor], Sequence[Tensor], int] | None = None
        self._seen: OrderedDict[object, None] = OrderedDict()
        self._pool: Any = None
        self._fails = False

    def __call__(
        self, given: Mapping[str, Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What the function returns, in memory of its own."""
        shapes = tuple((name, each.shape, each.dtype) for name, each in given.items())
        key = (self._number(keys, values), shapes)
        graph = self._kept.pop(key, None)
        if graph is None and key in self._seen and not self._fails:
            graph = self._recorded(given, keys, values)
        if graph is None:
            _keep(self._seen, key, None, _SEEN)
            return self._run(given, keys, values)
        _keep(self._kept, key, graph, MOST)
        for name, mine in graph.inputs.items():
            mine.copy_(given[name])
        graph.replay()
        return tuple(each.clone() for each in graph.outputs)

    def _number(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> int:
        """The number of a set of buffers; lists that were given last are known again, and must not have changed.

        A recording holds addresses. Buffers that grow move; where a shape comes back to an address, so does its use.
        """
        if self._latest is None or self._latest[0] is not keys or self._latest[1] is not values:
            buffers = tuple((each.data_ptr(), each.shape) for each in (*keys, *values))
            self._latest = keys, values, self._numbers.setdefault(buffers, len(self._numbers))
        return self._latest[2]

    def _recorded(self, given: Mapping[str, Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]) -> _Graph | None:
        """A recording; None where the device cannot record, once and for all: the results are the same without."""
        mine = {name: each.clone() for name, each in given.items()}
        if self._pool is None:
            self._pool = new_pool()
        try:
            outputs, replay = record(lambda: self._run(mine, keys, values), self._pool)
        except RuntimeError as cause:
            self._fails = True
            _log.warning("CUDA cannot record the passes of a model (%s): they take longer", reason(cause))
            return None
        return _Graph(mine, outputs, replay)


def _keep(held: OrderedDict[object, Any], key: object, value: Any, most: int) -> None:
    """Put an entry last, and drop the first where there are more than `most`."""
    held[key] = value
    held.move_to_end(key)
    if len(held) > most:
        held.popitem(last=False)


def new_pool() -> Any:
    """Memory that all recordings share: they never run at the same time, and outputs are copied."""
    return torch.cuda.graph_pool_handle()


def record(run: Callable[[], tuple[Tensor, ...]], pool: Any) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """Record a function without arguments; returns the tensors that a replay fills, and the replay."""
    here = torch.cuda.current_stream()
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP):
            run()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # Another thread may do what a recording of its own could not hold.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = run()
    return outputs, graph.replay
