"""Any transformers causal language model as a backend, by transformers' own forward pass."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import CacheView, SlotCache
from draftproof.backends.cache.windows import FULL, RECURRENT, SLIDING, windows_of
from draftproof.backends.hf import alibi
from draftproof.backends.hf.longrope import switch_of
from draftproof.backends.hf.native_modules import multiplies_natively, natively
from draftproof.backends.hf.probe import Probe
from draftproof.backends.hf.quantized_modules import QuantizedLinear, quantizing
from draftproof.backends.hf.truncate import first_layers, layers_of
from draftproof.backends.model_info import ADVICE, SNAPSHOTS, ModelInfo, cache_name, states_only
from draftproof.backends.new_weights import copy_into, state_of
from draftproof.backends.products.calibration import InputStatistics, write
from draftproof.backends.products.packed_linear import LinearSlice
from draftproof.backends.recurrent.mixers import mixers_of
from draftproof.errors import UndraftableError, UserError


@dataclass(frozen=True)
class StoredPrediction:
    """The prediction layers in the file that a model was read from, which are not read with it."""

    found: bool  # whether the file has some
    # makes transformers' class of them over a model, in eval mode; raises UserError where it cannot
    read: Callable[[Any], Any]


class HFBackend(SlotBackend):
    """A loaded transformers causal LM.

    On a CPU, few rows are multiplied natively (`native_modules`); the model itself is left as it is.

    Args:
        model: in eval mode, weights in place.
        check: compare it with the model's plain forward pass now (`Probe`); costs a few short passes.

    Raises:
        UserError: the model cannot roll back, or its rows differ from those of its plain pass.
    """

    kind = "hf"
    whole_keys = True  # whether its cache has the keys and values of all heads
    prediction: StoredPrediction | None = None  # None where a checkpoint of safetensors would have them

    def __init__(
        self, model: Any, *, name: str | None = None, check: bool = True, cache: SlotCache | None = None
    ) -> None:
        super().__init__(ModelInfo.of(model, name), cache=cache)
        self.model = model.eval()
        self.few_bits = _some(model, "few_bits")  # whether weights have these, and stay as they are
        self.rounds_inputs = _some(model, "rounds_inputs")  # whether inputs of products are rounded to 8 bits
        self.config = model.config.get_text_config()
        self.embed = model.get_input_embeddings()
        self._cache_name = cache_name(model) or ""
        self._states_only = states_only(model)
        if self.kind == HFBackend.kind and self._states_only:
            own = f"keeps its past in its own form ({self._cache_name})"
            raise UndraftableError(f"{self.name} {f'has {SNAPSHOTS}' if mixers_of(model) else f'{own}: {ADVICE}'}")
        alibi.follow_passes(model)
        self._switch = switch_of(model)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._counts = bool(getattr(self.config, "attn_temperature_tuning", False))
        if self._counts:  # one position for all rows, and along a row
            self.capabilities = replace(self.capabilities, trees=False, ragged=False)
        with self._cache.lock:  # limits are lowered meanwhile, in modules that another backend may share
            probe = self._probe() if check else None
            self._windows = windows_of(model) if probe is None else probe.windows
            self._multiply_natively()
            if probe is not None:
                probe.check(self, self.model)

    def _probe(self) -> Probe:
        return Probe(self.model, self.name, rounded=self.rounds_inputs)

    def _multiply_natively(self) -> None:
        """Read by a copy of the model that shares every weight and multiplies natively, where that is possible."""
        self.model = natively(self.model)
        self.own_threads = multiplies_natively(self.model)

    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
        """Rows of the output layer's weight, in the model's dtype."""
        head = self.model.get_output_embeddings()
        if isinstance(head, LinearSlice | QuantizedLinear):
            rows: Tensor = head.product.rows(ids)
            return rows.to(self.dtype)
        weight: Tensor = head.weight
        if weight.is_meta:
            raise UserError(f"{self.name} has its output layer on the disk, so nothing else can read it: load it whole")
        return weight.detach()[ids.to(weight.device)]

    def first_layers(self, layers: int) -> HFBackend:
        """The model's first layers on the same weights and in the same cache, checked like any model."""
        name = f"{self.name}, first {layers} layers"
        return type(self)(first_layers(self.model, layers, self.name), name=name, cache=self._cache)

    @override
    def quantizing(self, bits: int) -> Iterator[HFBackend | None]:
        """Everything but linear weights is shared."""
        self.refuse_few_bits(bits)
        steps, made = quantizing(self.model, bits, self.name, self._written, kept=self.keeps), None
        while made is None:
            with self._cache.lock:  # passes of both share modules, and change some of them meanwhile
                model = next(steps)
            if model is not None:
                made = self._with_model(model)
                made.facts = replace(self.facts, bits=bits)
            yield made

    def refuse_few_bits(self, bits: int) -> None:
        """Refuse to round weights that have few bits already."""
        if self.few_bits:
            raise UserError(
                f"{self.name} cannot be quantized to {bits} bits: its weights have few bits already; it can be drafted "
                "for by another drafter"
            )

    def rounded_copy(self, model: Any, bits: int) -> Any:
        """A form of its model as a target of 4 or 8 bits; errors as of `quantized_modules.quantizing`."""
        *_, made = quantizing(model, bits, self.name, self._written, kept=self.keeps, target=True)
        return made

    def _written(self, model: Any, statistics: Collection[InputStatistics]) -> Iterator[None]:
        """Let a form of the model write a text, in sessions of its own; see `calibration.write`."""
        reader = self._with_model(model)
        reader._cache = SlotCache(self.facts.max_positions)  # noqa: SLF001 - of this class
        reader._recorded = ()  # noqa: SLF001
        return write(reader, statistics)

    def _with_model(self, model: Any) -> HFBackend:
        """The same around another form of the model, in the same cache."""
        made = copy.copy(self)
        made.model = model
        return made

    @override
    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> HFBackend:
        """The model's own tensors are written over."""
        self._write(self.model, weights)
        made = copy.copy(self)
        made.keeps = False
        made._cache = SlotCache(self.facts.max_positions)  # noqa: SLF001 - of this class
        made._recorded = ()  # noqa: SLF001
        return made

    def _write(self, model: Any, weights: nn.Module | Mapping[str, Tensor]) -> None:
        if self.few_bits:
            raise UserError(f"the weights of {self.name} cannot be changed: they have few bits")
        copy_into(model, state_of(weights), self.name)

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        return self._call(layout, self._past(layout), hidden=hidden)

    def _past(self, layout: Layout) -> CacheView:
        """What attention layers get as their cache."""
        return CacheView(self._cache, layout.plan, counts=self._counts)

    def _call(self, layout: Layout, view: CacheView, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        keep = {"logits_to_keep": layout.requested} if self._keeps_rows else {}
        inner = hidden or bool(layout.layers)
        with self._unnormed(layout), alibi.in_pass(layout):
            out = self.model(
                input_ids=layout.ids, use_cache=True, output_hidden_states=inner, **self._inputs(layout, view), **keep
            )
        for layer in layout.layers:
            if layer < self.facts.layers:
                layout.taken[layer] = out.hidden_states[layer]
        return out.logits, out.hidden_states[-1] if hidden else None

    @contextmanager
    def _unnormed(self, layout: Layout) -> Iterator[None]:
        """Take the states after the last layer where they are asked for: transformers returns them normed."""
        last = self.facts.layers
        if last not in layout.layers:
            yield
            return
        layers = layers_of(self.model, last)
        if layers is None:
            raise UserError(f"the layers of {self.name} ({type(self.model).__name__}) are not one list of modules")

        def take(_module: Any, _given: Any, made: Any) -> None:
            layout.taken[last] = made if isinstance(made, Tensor) else made[0]

        handle = layers[-1].register_forward_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def _inputs(self, layout: Layout, view: CacheView) -> dict[str, Any]:
        return {"attention_mask": self._masks(layout), "position_ids": layout.positions, self._cache_name: view}

    def _masks(self, layout: Layout) -> Tensor | dict[str, Tensor | None]:
        """A mask for each kind of layer; a tensor where there is only one kind."""
        made = {kind: self._mask(layout, window) for kind, window in self._windows.now().items()}
        if len(made) == 1:
            return next(iter(made.values()))
        hybrid = {f"hybrid{name}": made.get(kind) for name, kind in (("", FULL), ("_sliding", SLIDING))}
        return {**dict.fromkeys(RECURRENT), **hybrid, **made}

    def _mask(self, layout: Layout, window: int | None) -> Tensor:
        """What an attention layer gets as the mask of a window."""
        return layout.mask(window, self.dtype)


def _some(model: nn.Module, name: str) -> bool:
    """Whether some module says so of itself."""
    return any(getattr(module, name, False) for module in model.modules())
