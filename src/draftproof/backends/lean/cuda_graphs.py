"""CUDA graphs of a function of tensors: its launches are recorded once for each shape, and then started by one call.

The layers of a model are hundreds of launches for each token, and the host needs longer for them than the device. On
machines without a device the tests record and replay on the CPU.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import reason

MOST = 64  # graphs kept; the one that was used least recently is dropped
_SEEN = 256  # sets that came once
_WARM_UP = 2  # calls before a recording: libraries set themselves up in the first ones, which a recording cannot hold

Run = Callable[..., tuple[Tensor, ...]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Graph:
    """A recording."""

    inputs: Sequence[Tensor]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


class Graphs:
    """A function of tensors as CUDA graphs, one for each set of shapes and of buffers.

    A set is recorded when it comes for the second time: recording takes as long as several runs, and prompts have many
    lengths.

    Args:
        run: takes `ids, cos, sin, masks, slots, places, keys, values`, as `RecordedPasses` passes them. It may write to
            keys and values only, the same whenever it is repeated, and may not wait for the device.
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
        self,
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        masks: Mapping[str, Tensor],
        slots: Tensor,
        places: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """What the function returns, in memory of its own."""
        given, kinds = [ids, cos, sin, slots, places, *masks.values()], tuple(masks)
        key = (kinds, self._number(keys, values), tuple((each.shape, each.dtype) for each in given))
        graph = self._kept.pop(key, None)
        if graph is None and key in self._seen and not self._fails:
            graph = self._recorded(given, kinds, keys, values)
        if graph is None:
            _keep(self._seen, key, None, _SEEN)
            return self._run(ids, cos, sin, masks, slots, places, keys, values)
        _keep(self._kept, key, graph, MOST)
        for mine, each in zip(graph.inputs, given, strict=True):
            mine.copy_(each)
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

    def _recorded(
        self, given: Sequence[Tensor], kinds: Sequence[str], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> _Graph | None:
        """A recording; None where the device cannot record, once and for all: the results are the same without."""
        mine = [each.clone() for each in given]

        def again() -> tuple[Tensor, ...]:
            ids, cos, sin, slots, places, *masks = mine
            return self._run(ids, cos, sin, dict(zip(kinds, masks, strict=True)), slots, places, keys, values)

        if self._pool is None:
            self._pool = new_pool()
        try:
            outputs, replay = record(again, self._pool)
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
