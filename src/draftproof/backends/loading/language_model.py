"""The text part of a multi-modal model: which class reads a checkpoint, and its language model without the towers.

The weights are read by transformers' own class for the whole checkpoint, with its own names of tensors. If the language
model inside is one of transformers' causal models, and gives the same logits for text, it is taken out, and the towers
for images or sound are dropped. Otherwise the whole model stays, and reads text only.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from draftproof.backends.model_info import sample_logits
from draftproof.errors import reason

_LANGUAGE = ("language_model", "text_model")  # names of the language model inside a multi-modal one
_log = logging.getLogger(__name__)


def reading_classes(source: str, *, gguf: str | None, trust_remote_code: bool) -> list[Any]:
    """Transformers' auto classes that may read a checkpoint, in order; a GGUF file is read by the causal class."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    causal: Any = AutoModelForCausalLM
    if gguf is not None:
        return [causal]
    try:
        config: Any = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception:  # noqa: BLE001 - the causal class says what is wrong
        return [causal]
    others: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    if _named(config, causal) or not any(_maps(config, each) for each in others):
        return [causal]
    kinds = [each for each in (causal, *others) if _maps(config, each)]
    first = {each._model_mapping[type(config)].__name__: each for each in reversed(kinds)}  # noqa: SLF001
    return [each for each in kinds if each in first.values()]


def _maps(config: Any, kind: Any) -> bool:
    return type(config) in kind._model_mapping  # noqa: SLF001 - there is no public way to ask


def _named(config: Any, kind: Any) -> bool:
    """Whether code that comes with the model has a class for this."""
    return kind.__name__ in (getattr(config, "auto_map", None) or {})


def text_part(model: Any) -> Any:
    """The language model of a multi-modal model as a causal model of its own; the model itself where it has none."""
    config = model.config
    text = config.get_text_config()
    language = _language_of(model)
    if text is config or language is None:
        return model
    try:
        made = _alone(model, text, language)
        same = made is not None and bool(torch.equal(sample_logits(made), sample_logits(model)))
    except Exception as cause:  # noqa: BLE001 - whatever is different there, the whole model is right
        _log.debug("the language model of %s stays in it: %s", type(model).__name__, reason(cause))
        return model
    return made if same else model


def _language_of(model: Any) -> Any:
    """The module that is the language model; None where there is none of its own."""
    for owner in (model, getattr(model, "model", None)):
        for name in _LANGUAGE:
            if isinstance(found := getattr(owner, name, None), nn.Module):
                return found
    return None


def _alone(model: Any, text: Any, language: Any) -> Any:
    """A causal model around a language model and its output layer; None where transformers has no such class."""
    from transformers import AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    if not _maps(text, causal):
        return None
    with torch.device("meta"):
        made: Any = causal.from_config(text, attn_implementation=text._attn_implementation)  # noqa: SLF001 - as it is set
    made.config = language.config
    made.generation_config = model.generation_config
    prefix = made.base_model_prefix
    if type(getattr(made, prefix, None)) is not type(language):
        return None
    setattr(made, prefix, language)
    made.set_output_embeddings(model.get_output_embeddings())
    if any(each.is_meta for each in [*made.parameters(), *made.buffers()]):
        return None
    return made.eval().requires_grad_(requires_grad=False)
