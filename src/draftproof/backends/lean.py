"""The lean forward as a backend, and which transformers models have one: the Llama family, unaltered.

Memory: the linear weights of the model are moved, not copied; what is held twice is the embedding of a model whose
output layer is tied to it, where weights are packed: rows are looked up in the plain one. The model that was given
still computes the same logits, by way of the moved weights, but cannot be trained, saved or moved any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.backends.checkpoint import Architecture
from draftproof.backends.facts import ModelFacts
from draftproof.backends.layout import Layout
from draftproof.backends.lean_layers import Lean
from draftproof.backends.new_weights import EMBEDDING, HEAD, StateWeights, refuse_misfits, state_of
from draftproof.backends.probe import Probe
from draftproof.backends.slots import SlotBackend
from draftproof.backends.windows import windows_of
from draftproof.errors import UserError

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
ROPES = ("default", "linear", "llama3", "yarn")  # those whose angles do not depend on how long the sequence is
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def supports(model: Any) -> str | None:
    """Why a model has no lean forward; None when it has one.

    Args:
        model: a transformers causal LM.
    """
    kind = type(model)
    if kind.__name__ not in {f"{family}ForCausalLM" for family in FAMILIES} or not _is_stock(kind):
        return f"{kind.__name__} is not of the families {', '.join(FAMILIES)}"
    config = model.config
    if (why := _why_built_otherwise(model)) is not None:
        return why
    rope = model.model.rotary_emb
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if rope.rope_type not in ROPES:
        return f"its rotary embedding is {rope.rope_type}, not one of {', '.join(ROPES)}"
    if 2 * rope.inv_freq.numel() != model.model.layers[0].self_attn.head_dim:
        return "its rotary embedding turns only a part of each head"
    return _why_altered(model)


def _why_built_otherwise(model: Any) -> str | None:
    """Whether a part that the lean forward reads is missing, of another class, or used twice."""
    family = type(model).__name__.removesuffix("ForCausalLM")
    norms = {"input_layernorm", "post_attention_layernorm"}
    projections = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
    inner = getattr(model, "model", None)
    expected: dict[str, tuple[Any, str]] = {
        "lm_head": (getattr(model, "lm_head", None), "Linear"),
        "model.norm": (getattr(inner, "norm", None), f"{family}RMSNorm"),
        "model.embed_tokens": (getattr(inner, "embed_tokens", None), "Embedding"),
        "model.rotary_emb": (getattr(inner, "rotary_emb", None), f"{family}RotaryEmbedding"),
    }
    layers = list(getattr(inner, "layers", ()))
    for number, layer in enumerate(layers):
        at = f"model.layers.{number}"
        expected |= {f"{at}.{name}": (getattr(layer, name, None), f"{family}RMSNorm") for name in norms}
        for part, names in projections.items():
            owner = getattr(layer, part, None)
            expected |= {f"{at}.{part}.{name}": (getattr(owner, name, None), "Linear") for name in names}
    for name, (found, kind) in expected.items():
        if type(found).__name__ != kind:
            return f"its {name} is a {type(found).__name__}, not a {kind}"
    parts = [id(found) for found, _ in expected.values()]
    if len(set(parts)) < len(parts) or len(layers) != model.config.num_hidden_layers:
        return "a part of it is used in several layers, or its config names another number of layers"
    return None


def _is_stock(kind: type) -> bool:
    return kind.__module__.startswith(("transformers.models.", "torch.nn.modules."))


def _why_altered(model: nn.Module) -> str | None:
    """Whether something was put into or hung onto a model that its own class does not say."""
    for name, weights in model.named_parameters():
        if hasattr(type(weights), "__tensor_flatten__"):  # a tensor made of others, as torchao's
            return f"its {name} is a {type(weights).__name__}: its weights are quantized"
    for name, module in model.named_modules():
        if not _is_stock(type(module)) and not name.endswith("act_fn"):
            return f"its {name} is a {type(module).__name__}, which transformers' own model has not"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]  # noqa: SLF001
        if "forward" in vars(module) or any(not _is_recorder(hook) for hook in hooks):
            return f"hooks are attached to {name or 'the model'}"
    held = {(weights.dtype, weights.device) for weights in model.parameters()}
    if len(held) > 1:
        return "its weights are of several dtypes or on several devices"
    dtype = next(iter(held))[0]
    return None if dtype in _DTYPES else f"its weights are {dtype}"


def _is_recorder(hook: Any) -> bool:
    """Hooks by which transformers itself collects hidden states, once it was asked for some."""
    return str(getattr(hook, "__module__", "")) == "transformers.utils.output_capturing"


class LeanForward(SlotBackend):
    """A model of the Llama family, read by the lean forward.

    Args:
        facts: of the model.
        lean: its forward pass, with its weights.
        cache: as `SlotBackend` has it.
    """

    kind = "lean"

    def __init__(self, facts: ModelFacts, lean: Lean, *, cache: SlotCache | None = None) -> None:
        super().__init__(facts, cache=cache)
        self.lean, self.packs = lean, lean.packs
        self.embed = lean.embed

    @property
    def products(self) -> str:
        """Which layout its products have, as `Product` names them."""
        return self.lean.head.layout

    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
        """Rows of the output layer's weight."""
        return self.lean.head.dense()[ids.to(self.device)]

    @property
    def takes_weights(self) -> bool:
        """Whether `with_weights` works."""
        return True

    def around(self, facts: ModelFacts, lean: Lean, cache: SlotCache | None = None) -> LeanForward:
        """A part or a form of the model that makes its passes as this one does; arguments as of the class."""
        return LeanForward(facts, lean, cache=cache)

    def first_layers(self, layers: int) -> LeanForward:
        """The model's first layers on the same weights and in the same cache."""
        made = self.around(self.facts, self.lean.first(layers), self._cache)
        made.capabilities = self.capabilities
        return made

    def quantizing(self, bits: int) -> Iterator[LeanForward | None]:
        """See `SlotBackend.quantizing`; embeddings and norms are shared."""
        for lean in self.lean.quantizing(bits, self.name):
            facts = replace(self.facts, bits=bits)
            made = None if lean is None else self.around(facts, lean, self._cache)
            if made is not None:
                made.capabilities = self.capabilities
            yield made

    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> SlotBackend:
        """See `SlotBackend.with_weights`; the weights are copied into a layout for this processor, as when loading."""
        architecture = Architecture.of(self.lean)
        if not self.takes_weights or architecture is None:
            return super().with_weights(weights)
        state = state_of(weights)
        if HEAD in state and EMBEDDING in state and state[HEAD].data_ptr() == state[EMBEDDING].data_ptr():
            del state[HEAD]  # tied
        refuse_misfits(state, architecture.shapes(state, self.facts.hidden_size, self.vocab_size), self.name)
        lean = architecture.lean_from(StateWeights(state, self.dtype, self.device))
        lean.rope, lean.windows = self.lean.rope, self.lean.windows
        made = self.around(self.facts, lean)
        made.max_positions, made.bounded_by = self.max_positions, self.bounded_by
        made.capabilities, made.prefill = self.capabilities, self.prefill
        return made

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        return self.lean(layout, self._cache, hidden=hidden)


class LeanBackend(LeanForward):
    """A transformers model of the Llama family, read by the lean forward.

    Args:
        model: in eval mode, weights in place; its linear weights move into the backend.
        name: how errors and reports call it.
        check: compare it with transformers' own forward pass now, whose rows are computed before anything moves.
        pack: whether to pack weights for the CPU.

    Attributes:
        probe: what was compared, where it was.

    Raises:
        UserError: no lean forward for this model, or its rows are not those of transformers' own.
    """

    def __init__(self, model: Any, *, name: str | None = None, check: bool = True, pack: bool = True) -> None:
        facts = ModelFacts.of(model, name)
        why = supports(model)
        if why is not None:
            raise UserError(f"{facts.name} has no lean forward: {why}; legal is backend hf (or auto)")
        self.model = model.eval()
        self.config = model.config
        self.probe = Probe(model, facts.name) if check else None
        self.windows = windows_of(model) if self.probe is None else self.probe.windows
        model.requires_grad_(requires_grad=False)
        super().__init__(facts, Lean(model, self.windows, getattr(model.config, "layer_types", None), pack=pack))
        if self.probe is not None:
            self._get_ready()
            self.probe.check(self)

    def _get_ready(self) -> None:
        """Called before the first pass."""
