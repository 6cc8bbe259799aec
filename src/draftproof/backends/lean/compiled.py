"""The lean forward as one program: torch.compile with the weights frozen into it on a CPU, CUDA graphs on CUDA.

On a CPU the compiler packs the weights and fuses the operations between two products. That takes about a minute when a
model is loaded, and again at the first batch of single tokens and the first batch of several. docs/log.md has its
speed: it gains little. On CUDA nothing is compiled: the launches of the layers are recorded for each shape (`graphs`),
since the host needs several times as long for them as the device. Rows that are not neighbours in the cache are
gathered. Wide passes (prompts), and on a CPU rows that are not neighbours, are read by the lean forward, on plain
weights; on a CPU these are kept beside the program's own.
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
from draftproof.backends.model_info import ModelInfo
from draftproof.errors import UserError, reason

WIDEST = (
    64  # most tokens of a row that the program reads, fewer than Layer folds; longer passes are bound by arithmetic
)
_BUCKET = 256  # on CUDA a graph serves this many horizons
_log = logging.getLogger(__name__)


class _ByProgram(LeanForward):
    """Narrow passes by a program, where there is one; all others by the lean forward."""

    kind = "compiled"
    _program: Program | None = None

    @property
    def by_graphs(self) -> bool:
        """Whether its passes are recorded, not compiled."""
        return self.device.type == "cuda"

    @property
    def rounding(self) -> str:
        """See `base.rounding`."""
        return super().rounding or "some passes are computed by torch.compile's program, and others are not"

    @property
    def takes_weights(self) -> bool:
        """See LeanForward; a compiled program holds its weights."""
        return self.by_graphs

    def around(self, facts: ModelInfo, lean: Lean, cache: SlotCache | None = None) -> LeanForward:
        """See LeanForward."""
        return forward_of(facts, lean, cache) if self.by_graphs else super().around(facts, lean, cache)

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        program = self._program
        ready = layout.width <= WIDEST and (self.by_graphs or (layout.plan.contiguous and not layout.layers))
        made = program(layout, self._cache) if program is not None and ready else None
        if made is None:
            return super()._compute(layout, hidden=hidden)
        logits, states = made
        return logits, states if hidden else None


class GraphForward(_ByProgram):
    """A lean forward on CUDA, such as that of a model's first layers, whose passes are recorded.

    Args:
        facts: of the model.
        lean: its forward pass, with its weights.
        cache: as `SlotBackend` has it.
    """

    def __init__(self, facts: ModelInfo, lean: Lean, *, cache: SlotCache | None = None) -> None:
        super().__init__(facts, lean, cache=cache)
        self._cache.pinned = True
        self._program = Program(lean, bucket=_BUCKET, records=True)


def forward_of(facts: ModelInfo, lean: Lean, cache: SlotCache | None = None) -> LeanForward:
    """The fastest backend for a lean forward that needs no compiler; arguments as of LeanForward."""
    kind = GraphForward if lean.embed.weight.device.type == "cuda" else LeanForward
    return kind(facts, lean, cache=cache)


class CompiledBackend(_ByProgram, LeanBackend):
    """A transformers model whose lean forward is compiled or recorded when it is loaded.

    Where CUDA cannot record it, a warning says so, and it works as backend lean does.

    Args:
        model: as for LeanBackend.
        name: its name in errors and reports.
        check: whether to run `probe` now.

    Raises:
        UserError: no lean forward for this model, torch.compile does not work here, or the probe found a difference.
    """

    def __init__(self, model: Any, *, name: str | None = None, check: bool = True) -> None:
        LeanBackend.__init__(self, model, name=name, check=check, pack=False)
        if not check:
            self._get_ready()

    def _get_ready(self) -> None:
        """Compile or record now, so that the first request need not wait."""
        by_graphs = self.by_graphs
        self._cache.pinned = by_graphs
        self._program = Program(self.lean, bucket=_BUCKET if by_graphs else 1, records=by_graphs)
        if not by_graphs:
            _log.info("compiling the forward pass of %s: a minute or two", self.name)
        start, session = time.perf_counter(), self.open()
        try:
            self.forward([Feed(session, [0])])  # nothing is cached yet: by the lean forward
            for _ in range(2 if by_graphs else 1):  # a shape is recorded when it comes again
                self.forward([Feed(session, [0, 0])])
        except UserError:
            raise
        except Exception as cause:
            if by_graphs:
                raise
            raise UserError(
                f"torch.compile cannot compile {self.name} here ({reason(cause)}): it needs a C++ compiler; use "
                f"backend lean, which needs none"
            ) from cause
        finally:
            session.close()
        _log.info("%s in %.0f s", "recorded" if by_graphs else "compiled", time.perf_counter() - start)


class Program:
    """The compiled or recorded pass over narrow feeds.

    Args:
        lean: the lean forward, with plain weights.
        bucket: horizons are rounded up to a multiple of this.
        records: whether passes are recorded as CUDA graphs; else they are compiled.
    """

    def __init__(self, lean: Lean, *, bucket: int, records: bool = False) -> None:
        self._lean = lean
        self._bucket = bucket
        self._records = records
        self._runs: dict[tuple[tuple[int, ...], bool], Run] = {}  # by the layers whose states are taken, and neighbours

    def _run(self, layers: tuple[int, ...], *, neighbours: bool) -> Run:
        key = layers, neighbours
        if key not in self._runs:
            self._runs[key] = (
                Graphs(_pass_of(self._lean, layers, neighbours=neighbours)) if self._records else _compile(self._lean)
            )
        return self._runs[key]

    def __call__(
        self, layout: Layout, cache: SlotCache
    ) -> tuple[Float[Tensor, "rows width vocab"], Float[Tensor, "rows width dim"]] | None:
        """Logits and states of every column; None where the cache has no buffers yet.

        States of `layout.layers` go to `layout.taken`; only recorded passes take some.

        Padding is computed and written like any token, to positions that are overwritten before they are read.
        """
        plan, device = layout.plan, layout.device
        rows, width = layout.ids.shape
        # a single token would be another program, and no faster
        spread = 2 if rows * width == 1 and not self._records else width
        bases = sent(plan.bases, device).unsqueeze(1)
        horizon = -(-plan.horizon // self._bucket) * self._bucket
        cache.claim(plan.slots, [base + spread for base in plan.bases])
        cache.reserve(horizon)
        neighbours = plan.contiguous
        views = cache.views(plan.slots[0], rows) if neighbours else cache.views()
        if views is None:
            return None
        places = (bases + torch.arange(spread, device=device)).flatten()
        ids, positions = (part.expand(-1, spread).flatten().contiguous() for part in (layout.ids, layout.positions))
        masks = {kind: self._mask(layout, window, spread, horizon) for kind, window in self._lean.windows.now().items()}
        cos, sin = self._lean.rope(positions, plan.horizon)
        own = torch.arange(rows, device=device) if neighbours else sent(plan.slots, device)
        slots = own.repeat_interleave(spread)
        run = self._run(layout.layers, neighbours=neighbours)
        if self._records:
            logits, states, *taken = (
                each.view(rows, spread, -1) for each in run(ids, cos, sin, masks, slots, places, *views)
            )
            layout.taken.update(zip(layout.layers, taken, strict=True))
            return logits, states
        _mark_dynamic(*((each, (0,)) for each in (ids, cos, sin, places, slots)))
        _mark_dynamic(*((mask, (0, 2, 3)) for mask in masks.values()))
        _mark_dynamic(*((view, (0, 2)) for store in views for view in store))
        with torch._dynamo.config.patch(install_free_tensors=True):  # noqa: SLF001 - freezes the weights
            logits, states = run(ids, cos, sin, masks, slots, places, *views)
        return logits.view(rows, spread, -1)[:, :width], states.view(rows, spread, -1)[:, :width]

    def _mask(self, layout: Layout, window: int | None, spread: int, horizon: int) -> Tensor:
        dtype = self._lean.embed.weight.dtype
        mask = layout.mask(window, dtype).expand(-1, -1, max(spread, layout.width), -1)
        mask = mask.repeat_interleave(self._lean.layers[0].heads.group, 2)
        return F.pad(mask, (0, horizon - mask.shape[-1]), value=torch.finfo(dtype).min)


def _mark_dynamic(*sizes: tuple[Tensor, tuple[int, ...]]) -> None:
    """Compile these dimensions for any size except 1, which gets its own program."""
    for tensor, dims in sizes:
        for dim in dims:
            if tensor.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)  # noqa: SLF001 - has no public name


def _compile(lean: Lean) -> Run:
    """The pass compiled; its weights, found in a closure, are frozen into the program."""
    made: Run = torch.compile(_pass_of(lean), options={"freezing": True})
    return made


def _pass_of(lean: Lean, layers: tuple[int, ...] = (), *, neighbours: bool = True) -> Run:
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
