"""The lean forward as a backend, and which transformers models have one: decoders with known traits, unaltered.

Memory: the linear weights of the model are moved, not copied. Only a tied embedding exists twice when weights are
packed: looking up rows needs the plain copy. The model that was given still computes the same logits, by way of the
moved weights, but cannot be trained, saved or moved any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.cache.windows import windows_of
from draftproof.backends.hf.longrope import FactorSwitch
from draftproof.backends.hf.probe import Probe
from draftproof.backends.lean.checkpoint import Architecture, StateWeights
from draftproof.backends.lean.layers import Lean
from draftproof.backends.lean.traits import Traits, UnreadError, is_hooked, is_stock, seen_traits, traits_of
from draftproof.backends.model_info import ModelInfo
from draftproof.backends.new_weights import EMBEDDING, HEAD, refuse_other_shapes, state_of
from draftproof.backends.products.calibration import InputStatistics, write
from draftproof.errors import UserError
from draftproof.native.tensors import BITS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def supports(model: Any) -> str | None:
    """Why a model has no lean forward; None when it has one."""
    try:
        if (why := _why_altered(model)) is None:
            seen_traits(model)
    except UnreadError as cause:
        why = str(cause)
    return why


def _why_altered(model: nn.Module) -> str | None:
    """Whether something was put into or hung onto a model that its own class does not say."""
    for name, weights in model.named_parameters():
        if hasattr(type(weights), "__tensor_flatten__"):  # a tensor made of others, as torchao's
            return f"its {name} is a {type(weights).__name__}: its weights are quantized"
    for name, module in model.named_modules():
        if not is_stock(type(module)):
            return f"its {name} is a {type(module).__name__}, which transformers' own model has not"
        if is_hooked(module):
            return f"hooks are attached to {name or 'the model'}"
    held = {(weights.dtype, weights.device) for weights in model.parameters()}
    if len(held) != 1:
        return "its weights are of several dtypes or on several devices"
    dtype, device = next(iter(held))
    return None if dtype in _DTYPES and device.type != "meta" else f"its weights are {dtype} on {device}"


def readable_traits(model: Any, name: str) -> Traits:
    """How the lean forward reads a model."""
    try:
        why, traits = _why_altered(model), None
        if why is None:
            traits = traits_of(model)
    except UnreadError as cause:
        why = str(cause)
    if traits is None:
        raise UserError(f"{name} has no lean forward: {why}; use backend hf or auto")
    return traits


class LeanForward(SlotBackend):
    """A model read by the lean forward."""

    kind = "lean"

    def __init__(self, facts: ModelInfo, lean: Lean, *, cache: SlotCache | None = None) -> None:
        super().__init__(facts, cache=cache)
        self.lean = lean
        self.packs = lean.packs
        self.embed = lean.embed
        length = lean.traits.length
        self._switch = FactorSwitch(lambda: length) if length else None
        self._drafting: LeanForward | None = None

    @property
    def products(self) -> str:
        """Which layout its products have, as `PackedLinear` names them."""
        return self.lean.head.layout

    @property
    @override
    def rounding(self) -> str:
        return self.lean.rounding

    @property
    def own_threads(self) -> bool:
        """Whether its products run on the C library's threads."""
        return self.lean.is_native

    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
        """Rows of the output layer's weight, in the model's dtype."""
        return self.lean.head.rows(ids.to(self.device)).to(self.dtype)

    @property
    def takes_weights(self) -> bool:
        """Whether `with_weights` works."""
        return self.facts.bits is None

    def around(self, facts: ModelInfo, lean: Lean, cache: SlotCache | None = None) -> LeanForward:
        """A part or a form of the model that makes its passes as this one does; arguments as of the class."""
        return LeanForward(facts, lean, cache=cache)

    def first_layers(self, layers: int) -> LeanForward:
        """The model's first layers on the same weights and in the same cache."""
        return self._form(self.facts, self.lean.first(layers), self._cache)

    def _form(self, facts: ModelInfo, lean: Lean, cache: SlotCache | None = None) -> LeanForward:
        """The same as `around`, with the capabilities and the limits of this backend."""
        made = self.around(facts, lean, cache)
        made.max_positions = self.max_positions
        made.bounded_by = self.bounded_by
        made.capabilities = self.capabilities
        made.prefill = self.prefill
        return made

    @override
    def for_drafts(self) -> LeanForward:
        if self._drafting is None:  # several engines may share it
            lean = self.lean.for_drafts()
            self._drafting = self if lean.head is self.lean.head else self._form(self.facts, lean, self._cache)
        return self._drafting

    @override
    def quantizing(self, bits: int) -> Iterator[LeanForward | None]:
        """Embeddings and norms are shared."""
        steps = self.lean.quantizing(bits, self.name, self._written, kept=self.keeps)
        made = None
        while made is None:
            with self._cache.lock:  # the passes share parts with those of the model
                lean = next(steps)
            if lean is not None:
                made = self._form(replace(self.facts, bits=bits), lean, self._cache)
            yield made

    def _written(self, lean: Lean, statistics: Collection[InputStatistics]) -> Iterator[None]:
        """Let a form of the model write a text; see `calibration.write`."""
        reader = LeanForward(self.facts, lean)
        reader.max_positions = self.max_positions
        reader.capabilities = self.capabilities
        return write(reader, statistics)

    @override
    def rounded(self, bits: int) -> LeanForward:
        *_, lean = self.lean.quantizing(bits, self.name, self._written, kept=self.keeps, head_bits=BITS[-1])
        assert lean is not None, "the last step gives the model"
        return self._form(replace(self.facts, bits=bits), lean)

    @property
    @override
    def stores_kv(self) -> bool:
        return self.kind == LeanForward.kind and self.device.type == "cpu"

    @override
    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> SlotBackend:
        """The weights are copied into a layout for this processor, as when loading."""
        architecture = Architecture.of(self.lean)
        if not self.takes_weights or architecture is None:
            return super().with_weights(weights)
        state = state_of(weights)
        if HEAD in state and EMBEDDING in state and state[HEAD].data_ptr() == state[EMBEDDING].data_ptr():
            del state[HEAD]  # tied
        refuse_other_shapes(state, architecture.shapes(state, self.facts.hidden_size, self.vocab_size), self.name)
        lean = architecture.lean_from(StateWeights(state, self.dtype, self.device))
        lean.rope = self.lean.rope
        lean.windows = self.lean.windows
        made = self._form(self.facts, lean)
        if self._cache.kept is not None:
            made.store_kv(self._cache.kept)
        made.keeps = False
        return made

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        return self.lean(layout, self._cache, hidden=hidden)


class LeanBackend(LeanForward):
    """A transformers model, read by the lean forward.

    Args:
        model: in eval mode, weights in place; its linear weights move into the backend.
        check: compare it with transformers' own forward pass now, whose rows are computed before anything moves.
        pack: whether to pack weights for the CPU.

    Raises:
        UserError: no lean forward for this model, or its rows are not those of transformers' own.
    """

    def __init__(self, model: Any, *, name: str | None = None, check: bool = True, pack: bool = True) -> None:
        facts = ModelInfo.of(model, name)
        self.model = model.eval()
        traits = readable_traits(model, facts.name)
        self.config = model.config
        self.probe = Probe(model, facts.name) if check else None  # what was compared, where it was
        self.windows = windows_of(model) if self.probe is None else self.probe.windows
        model.requires_grad_(requires_grad=False)
        kinds = getattr(model.config, "layer_types", None)
        super().__init__(facts, Lean(model, self.windows, traits, kinds, pack=pack))
        if self.probe is not None:
            self.probe.check(self, beyond=False)
