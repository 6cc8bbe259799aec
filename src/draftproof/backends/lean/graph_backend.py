"""The lean forward on CUDA: the launches of its layers are recorded for each shape, and started by one call.

The host needs several times as long for the launches as the device for their work (`cuda_graphs`). Rows that are not
neighbours in the cache are gathered. Wide passes (prompts) are launched one operation after another, as `LeanForward`
does it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float
from torch import Tensor

from draftproof.accelerator import sent
from draftproof.backends.base import Feed
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.lean.attention import Cells, Pass
from draftproof.backends.lean.backend import LeanBackend, LeanForward
from draftproof.backends.lean.cuda_graphs import Graphs, Run
from draftproof.backends.lean.layers import Lean
from draftproof.backends.model_info import ModelInfo, input_device
from draftproof.errors import UserError

WIDEST = 64  # most tokens of a row whose pass is recorded, fewer than Layer folds; longer ones are bound by arithmetic
_BUCKET = 256  # a graph serves this many horizons
_log = logging.getLogger(__name__)


class GraphForward(LeanForward):
    """A lean forward on CUDA, such as that of a model's first layers, whose narrow passes are recorded."""

    kind = "graphs"

    def __init__(self, facts: ModelInfo, lean: Lean, *, cache: SlotCache | None = None) -> None:
        super().__init__(facts, lean, cache=cache)
        self._cache.pinned = True
        self._recorded_passes = RecordedPasses(lean, bucket=_BUCKET)

    def around(self, facts: ModelInfo, lean: Lean, cache: SlotCache | None = None) -> LeanForward:
        """See LeanForward."""
        return forward_of(facts, lean, cache)

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        made = self._recorded_passes(layout, self._cache) if layout.width <= WIDEST else None
        if made is None:
            return super()._compute(layout, hidden=hidden)
        logits, states = made
        return logits, states if hidden else None


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


class RecordedPasses:
    """Passes over narrow feeds, recorded as CUDA graphs."""

    def __init__(self, lean: Lean, *, bucket: int) -> None:
        self._lean = lean
        self._bucket = bucket
        self._graphs: dict[
            tuple[tuple[int, ...], bool], Graphs
        ] = {}  # by the layers whose states are taken, neighbours

    def __call__(
        self, layout: Layout, cache: SlotCache
    ) -> tuple[Float[Tensor, "rows width vocab"], Float[Tensor, "rows width dim"]] | None:
        """Logits and states of every column; None where the cache has no buffers yet.

        States of `layout.layers` go to `layout.taken`. Padding is computed and written like any token, to positions
        that are overwritten before they are read.
        """
        plan, device = layout.plan, layout.device
        rows, width = layout.ids.shape
        horizon = -(-plan.horizon // self._bucket) * self._bucket
        cache.claim(plan.slots, [base + width for base in plan.bases])
        cache.reserve(horizon)
        neighbours = plan.contiguous
        views = cache.views(plan.slots[0], rows) if neighbours else cache.views()
        if views is None:
            return None
        places = (sent(plan.bases, device).unsqueeze(1) + torch.arange(width, device=device)).flatten()
        ids, positions = (part.flatten().contiguous() for part in (layout.ids, layout.positions))
        masks = {kind: self._mask(layout, window, horizon) for kind, window in self._lean.windows.now().items()}
        cos, sin = self._lean.rope(positions, plan.horizon)
        own = torch.arange(rows, device=device) if neighbours else sent(plan.slots, device)
        key = layout.layers, neighbours
        if key not in self._graphs:
            self._graphs[key] = Graphs(_pass_of(self._lean, layout.layers, neighbours=neighbours))
        made = self._graphs[key](ids, cos, sin, masks, own.repeat_interleave(width), places, *views)
        logits, states, *taken = (each.view(rows, width, -1) for each in made)
        layout.taken.update(zip(layout.layers, taken, strict=True))
        return logits, states

    def _mask(self, layout: Layout, window: int | None, horizon: int) -> Tensor:
        dtype = self._lean.embed.weight.dtype
        mask = layout.mask(window, dtype).repeat_interleave(self._lean.layers[0].heads.group, 2)
        return F.pad(mask, (0, horizon - mask.shape[-1]), value=torch.finfo(dtype).min)


def _pass_of(lean: Lean, layers: tuple[int, ...], *, neighbours: bool) -> Run:
    """The layers as a function of tensors only: logits, last states, and the states after some layers.

    Keys and values are those of the rows, or where these are not neighbours of all slots.
    """

    def run(
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        masks: dict[str, Tensor],
        slots: Tensor,
        places: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        rows, _, _, horizon = next(iter(masks.values())).shape
        read = None if neighbours else slots.view(rows, -1)[:, 0]
        buffers = Cells(keys, values, slots, places, horizon, read)
        at = Pass(rows, ids.shape[0] // rows, cos, sin, buffers, None)
        x = lean.enter(ids)
        taken = [x.clone()] if 0 in layers else []  # clones: layers may overwrite x
        for number, layer in enumerate(lean.layers, 1):
            x = layer(x, at, masks[layer.kind])
            if number in layers:
                taken.append(x.clone())
        states = lean.norm(x)
        return lean.logits(states), states, *taken

    return run
