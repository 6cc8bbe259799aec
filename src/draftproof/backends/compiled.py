"""The lean forward as one program: torch.compile with the weights frozen into it on a CPU, CUDA graphs on CUDA.

On a CPU the compiler packs the weights and fuses the operations between two products. That takes about a minute when a
model is loaded, and again at the first batch of single tokens and the first batch of several. docs/log.md has its
speed: it gains little. On CUDA nothing is compiled: the launches of the layers are recorded for each shape (`graphs`),
which has never run on a device. Wide passes (prompts), and rows that are not neighbours in the cache, are read by the
lean forward, on plain weights; on a CPU these are kept beside the program's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.accelerator import sent
from draftproof.backends.attention import Pass
from draftproof.backends.base import Feed
from draftproof.backends.graphs import Graphs
from draftproof.backends.layout import Layout
from draftproof.backends.lean import LeanBackend
from draftproof.backends.lean_layers import Lean
from draftproof.backends.slot_cache import SlotCache
from draftproof.errors import UserError, reason

WIDEST = (
    64  # most tokens of a row that the program reads, fewer than Layer folds; longer passes are bound by arithmetic
)
_BUCKET = 256  # on CUDA a graph serves this many horizons
_log = logging.getLogger(__name__)


class CompiledBackend(LeanBackend):
    """A transformers model of the Llama family, whose lean forward is compiled or recorded when it is loaded.

    Args:
        model: as for LeanBackend.
        name: its name in errors and reports.
        check: whether to run `probe` now.

    Raises:
        UserError: no lean forward for this model, torch.compile does not work here, or the probe found a difference.
    """

    kind = "compiled"

    def __init__(self, model: Any, *, name: str | None = None, check: bool = True) -> None:
        super().__init__(model, name=name, check=check, pack=False)
        if not check:
            self._get_ready()

    def _get_ready(self) -> None:
        """Compile now, so that the first request need not wait."""
        records = self.device.type == "cuda"
        self._cache.pinned = records
        self._program = Program(self.lean, bucket=_BUCKET if records else 1, records=records)
        if not records:
            _log.info("compiling the forward pass of %s: a minute or two", self.name)
        start, session = time.perf_counter(), self.open()
        try:
            self.forward([Feed(session, [0])])  # nothing is cached yet: by the lean forward
            self.forward([Feed(session, [0, 0])])
        except UserError:
            raise
        except Exception as cause:
            failed = "CUDA cannot record" if records else "torch.compile cannot compile"
            needs = "" if records else ": it needs a C++ compiler"
            raise UserError(
                f"{failed} {self.name} here ({reason(cause)}){needs}; legal is backend lean, which does without"
            ) from cause
        finally:
            session.close()
        _log.info("%s in %.0f s", "recorded" if records else "compiled", time.perf_counter() - start)

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        ready = layout.width <= WIDEST and layout.plan.contiguous and not layout.layers
        made = self._program(layout, self._cache) if ready else None
        if made is None:
            return super()._compute(layout, hidden=hidden)
        logits, states = made
        return logits, states if hidden else None


class _Buffers:
    """Keys and values as the compiled layers write and read them.

    Args:
        keys, values: of each layer, [rows heads capacity dim].
        rows, positions: where each token is written.
        horizon: number of positions read.
    """

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        rows: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        horizon: int,
    ) -> None:
        self._stores, self._cells, self._horizon = (keys, values), (rows, positions), horizon

    def write(self, layer: int, _plan: object, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """See `SlotCache.write`."""
        found = []
        for store, new in zip(self._stores, (keys, values), strict=True):
            store[layer].transpose(1, 2).index_put_(self._cells, new.transpose(1, 2).flatten(0, 1))
            found.append(store[layer].narrow(2, 0, self._horizon))
        return tuple(found)


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
        self._run: Callable[..., tuple[Tensor, ...]] = Graphs(_pass_of(lean)) if records else _compile(lean)

    def __call__(
        self, layout: Layout, cache: SlotCache
    ) -> tuple[Float[Tensor, "rows width vocab"], Float[Tensor, "rows width dim"]] | None:
        """Logits and states of every column; None where the cache has no buffers yet.

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
        views = cache.views(plan.slots[0], rows)
        if views is None:
            return None
        places = (bases + torch.arange(spread, device=device)).flatten()
        ids, positions = (part.expand(-1, spread).flatten().contiguous() for part in (layout.ids, layout.positions))
        masks = {kind: self._mask(layout, window, spread, horizon) for kind, window in self._lean.windows.now().items()}
        cos, sin = self._lean.rope(positions, plan.horizon)
        slots = torch.arange(rows, device=device).repeat_interleave(spread)
        if self._records:
            logits, states = self._run(ids, cos, sin, masks, slots, places, *views)
            return logits.view(rows, spread, -1), states.view(rows, spread, -1)
        _mark_dynamic(*((each, (0,)) for each in (ids, cos, sin, places, slots)))
        _mark_dynamic(*((mask, (0, 2, 3)) for mask in masks.values()))
        _mark_dynamic(*((view, (0, 2)) for store in views for view in store))
        with torch._dynamo.config.patch(install_free_tensors=True):  # noqa: SLF001 - freezes the weights
            logits, states = self._run(ids, cos, sin, masks, slots, places, *views)
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


def _compile(lean: Lean) -> Callable[..., tuple[Tensor, Tensor]]:
    """The pass compiled; its weights, found in a closure, are frozen into the program."""
    made: Callable[..., tuple[Tensor, Tensor]] = torch.compile(_pass_of(lean), options={"freezing": True})
    return made


def _pass_of(lean: Lean) -> Callable[..., tuple[Tensor, Tensor]]:
    """The layers as a function of tensors only."""

    def run(
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        masks: dict[str, Tensor],
        slots: Tensor,
        places: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        rows, _, _, horizon = next(iter(masks.values())).shape
        buffers = _Buffers(keys, values, slots, places, horizon)
        at = Pass(rows, ids.shape[0] // rows, cos, sin, buffers, None)
        x = F.embedding(ids, lean.embed.weight)
        for layer in lean.layers:
            x = layer(x, at, masks[layer.kind])
        states = lean.norm(x)
        return lean.head(states), states

    return run
