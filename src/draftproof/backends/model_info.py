"""What a backend says of its model: sizes, the tokens that end a text, the checkpoint's own sampling defaults."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.errors import UndraftableError, UserError

_CONTEXT = ("max_position_embeddings", "max_seq_len", "max_target_positions")  # names of the longest sequence

ADVICE = "speculative decoding needs a decoder-only model whose keys, values and states are in transformers' own cache"

SNAPSHOTS = "layers with a recurrent state, which this backend cannot take back: use backend snapshot or auto"


@functools.cache
def cache_names() -> tuple[str, ...]:
    """The names that models give to transformers' own cache; from transformers 5.24 on it is called `cache`."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    renamed = ("cache",) if "cache" in {each.name for each in fields(CausalLMOutputWithPast)} else ()
    return ("past_key_values", *renamed, "cache_params")


def cache_name(model: Any) -> str | None:
    """The name under which a module's forward pass takes its cache; None if it takes none of transformers' own."""
    taken = inspect.signature(model.forward).parameters
    own = "dict" in str(taken["cache"].annotation) if "cache" in taken else False  # XLM's cache is its own
    return next((name for name in cache_names() if name in taken and not (name == "cache" and own)), None)


def states_only(model: Any) -> bool:
    """Whether a model keeps states alone in its cache, without keys and values; xLSTM does so in a class of its own."""
    from transformers import DynamicCache, cache_utils

    name, library = cache_name(model), cast("Any", DynamicCache)
    taken = inspect.signature(model.forward).parameters
    if name != "cache" or "position_ids" in taken:
        return name == "cache_params" and "position_ids" not in taken
    kinds = re.findall(r"\b\w+Cache\b", str(taken[name].annotation))
    return any(not hasattr(cache_utils, kind) for kind in kinds) or all(library(config=model.config).is_linear)


def refuse_unsuitable(model: Any, name: str) -> None:
    """Refuse models whose kind alone says that their cache cannot be rolled back."""
    kind = type(model).__name__
    absent = [
        each for each in ("hidden_size", "num_hidden_layers") if not hasattr(model.config.get_text_config(), each)
    ]
    if absent:
        raise UndraftableError(f"{name}: the config of transformers' {kind} has no {' and no '.join(absent)}: {ADVICE}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder model: {ADVICE}")
    parameters = inspect.signature(model.forward).parameters
    if cache_name(model) is None:
        known = {"state", "cache"} & set(parameters)
        kept = (
            f"keeps its past in its own form ({', '.join(known)})"
            if known
            else "keeps no keys and values between calls"
        )
        raise UndraftableError(f"{name}: transformers' {kind} {kept}: {ADVICE}")


PACKED = "packed"
"""The method of models whose linear layers are native products with the numbers of their checkpoint."""


def quantization_method(model: Any) -> str | None:
    """Name of the method by which the weights of a checkpoint are quantized; None where they are not."""
    given = getattr(model.config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    return str(getattr(method, "value", method) or type(given).__name__)


def input_device(model: Any) -> torch.device:
    """Where a model takes its tokens; an embedding that is kept on the disk has another device while it runs."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    hooks = (getattr(each, "_hf_hook", None) for each in (embedding, model))
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((place for place in places if place is not None), "cpu"))


@torch.inference_mode()
def sample_logits(model: Any) -> Float[Tensor, "tokens vocab"]:
    """A model's own logits of nine tokens from all over its vocabulary."""
    vocab = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.linspace(1, vocab - 1, 9, device=input_device(model)).long()
    logits: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits
    return logits[0].clone()


@dataclass(frozen=True)
class ModelInfo:
    """Facts of a causal language model."""

    name: str  # how errors and reports call it
    vocab_size: int  # width of a row of logits
    hidden_size: int  # width of a hidden state
    layers: int  # number of decoder layers
    max_positions: int | None  # longest sequence; None when unbounded
    # dtype, device: of the weights; the device is where tokens are fed
    dtype: torch.dtype
    device: torch.device
    bits: int | None = None  # of a quantized weight; None where weights have the dtype
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text
    bos_token_id: int | None = None  # the token that begins one; None where the config names none
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # the fields that the generation config sets

    @property
    def size(self) -> int:
        """Bytes of the weights that a pass reads, estimated from width and depth."""
        weights = (12 * self.layers * self.hidden_size + self.vocab_size) * self.hidden_size
        # Beside its bits, a quantized weight has one more, its share of the scale and the offset of its group.
        return weights * (8 * self.dtype.itemsize if self.bits is None else self.bits + 1) // 8

    @classmethod
    def of(cls, model: Any, name: str | None = None) -> ModelInfo:
        """Of a loaded transformers model."""
        made = cls.loosely(model, name)
        refuse_unsuitable(model, made.name)
        return made

    @classmethod
    def loosely(cls, model: Any, name: str | None = None) -> ModelInfo:
        """The same of a model that may be unsuitable; sizes that its config does not name are 0."""
        name = _named(model, name)
        if (head := model.get_output_embeddings()) is None:
            raise UserError(
                f"{name} ({type(model).__name__}) has no output embedding, so it is no causal language model"
            )
        config = model.config.get_text_config()
        generation = getattr(model, "generation_config", None)
        return cls(
            name=name,
            vocab_size=int(head.weight.shape[0]),
            hidden_size=int(getattr(config, "hidden_size", 0)),
            layers=int(getattr(config, "num_hidden_layers", 0)),
            max_positions=_context(config),
            dtype=model.dtype,
            device=input_device(model),
            eos_token_ids=end_tokens(getattr(generation, "eos_token_id", None))
            or end_tokens(getattr(config, "eos_token_id", None)),
            bos_token_id=next(iter(end_tokens(getattr(config, "bos_token_id", None))), None),
            sampling_defaults={} if generation is None else generation.to_diff_dict(),
        )


def _context(config: Any) -> int | None:
    """The longest sequence by a config; None where it names none, or -1 as XLNet does."""
    named = (getattr(config, name, None) for name in _CONTEXT)
    return next((value for value in named if isinstance(value, int) and value > 0), None)


def _named(model: Any, name: str | None) -> str:
    return name or str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def end_tokens(*found: int | Sequence[int] | None) -> tuple[int, ...]:
    """End-of-sequence ids: all that a config, a generation config or a tokenizer names, each once, in order."""
    ids: list[int] = []
    for each in found:
        ids += [each] if isinstance(each, int) else each or ()
    return tuple(dict.fromkeys(ids))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, divided by that of `expected`; infinite if there are NaNs."""
    right = expected.detach().double()
    error = float((found.detach().to(right) - right).norm() / right.norm().clamp(min=1e-12))
    return math.inf if math.isnan(error) else error
