"""Speculative decoding inside transformers' own `generate`, by one argument.

    model.generate(**inputs, custom_generate=speculative(draft="embedded:draft"))

The model stays as it is: see `draftproof.backends.loading.in_memory`. The guide (docs/guide/transformers.md) has a
table of the generation config's fields, and says what is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.model_info import cache_names
from draftproof.engine.stats import Stats
from draftproof.errors import UserError
from draftproof.integrations.engine_cache import EngineConfig, engine_of, forget
from draftproof.integrations.generation_config import refuse_fields
from draftproof.integrations.processors import refuse_stateful
from draftproof.integrations.rows import Ends, Rows, params_of, prompts_of

__all__ = ["Speculative", "forget", "speculative"]
_OURS = ("use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "return_dict")
_FRAMES = 32  # between transformers' generate and the callable there may be a caller's own wrappers


class Speculative:
    """What `generate` takes as `custom_generate`; made by `speculative`.

    Attributes:
        stats: of the last call: tokens per target call, accepted tokens, times; None before the first.
    """

    def __init__(self, composition: EngineConfig, stop_strings: Sequence[str] = (), tokenizer: Any = None) -> None:
        self.composition = composition
        self._stop_strings = tuple(stop_strings)
        self._tokenizer = tokenizer
        self.stats: Stats | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Int[Tensor, "rows length"],
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Generate, as transformers' `generate` asks for it.

        Returns sequences [rows, length], or a `GenerateDecoderOnlyOutput` where `return_dict_in_generate` is set. A
        UserError names what cannot be had here, and says what to do in its place.
        """
        caller = _generate_locals()
        refuse_fields(generation_config)
        _refuse_arguments(model, input_ids, model_kwargs, caller)
        refuse_stateful(logits_processor)
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        prompts = prompts_of(input_ids, mask, positions)
        criteria = [*stopping_criteria, *self._stop_criteria()]
        ends = Ends.of(criteria, len(prompts))
        do_sample = bool(generation_config.do_sample)
        params = params_of(logits_processor, prompts, input_ids, ends, do_sample=do_sample)
        pad = getattr(generation_config, "_pad_token_tensor", None)
        streamer = caller.get("streamer")
        columns = []
        with engine_of(model, self.composition) as engine:
            rows = Rows(engine, prompts, params, input_ids, ends, None if pad is None else int(pad))
            for column in rows.columns():
                columns.append(column)
                if streamer is not None:
                    streamer.put(column.cpu())
            self.stats = rows.stats
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, torch.stack(columns, -1).to(input_ids)], -1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return _as_dict(model, sequences, mask, len(columns), generation_config, logits_processor)

    def _stop_criteria(self) -> list[Any]:
        if not self._stop_strings:
            return []
        from transformers.generation.stopping_criteria import StopStringCriteria

        return [StopStringCriteria(self._tokenizer, list(self._stop_strings))]


def speculative(
    draft: Any = None, *, stop_strings: str | Sequence[str] = (), tokenizer: Any = None, **options: Any
) -> Speculative:
    """Speculative decoding for `model.generate(..., custom_generate=speculative(...))`, and for pipelines.

    Dtype and device are the model's own. Calls with equal arguments share an engine, which is kept as long as the model
    lives and its weights stay the same.

    Args:
        draft: the draft model: a name, directory or hub id, or a transformers model in memory.
        stop_strings: texts that end a row; `generate` itself cannot pass them on.
        tokenizer: the model's, for `stop_strings` and to compare with that of a draft model given by name.
        **options: fields of `EngineOptions`, but for those that the loaded model has decided (dtype, device and the
            like). `backend`: "lean" reads copies of the linear weights, which doubles their memory and is several times
            faster on a CPU; "hf" and "snapshot" share the model's own; "auto" takes "lean" where the model allows it
            and there is memory. `draft_dtype`: for a draft model in memory only int8 and int4. `prefix_reuse`: what is
            kept of earlier calls takes up to 1 GiB, or `kv_memory`.

    Raises:
        UserError: an option or value that is none; stop strings without a tokenizer.
    """
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if strings and tokenizer is None:
        raise UserError(f"stop_strings are {list(strings)!r}, and there is no tokenizer to find them with: give both")
    return Speculative(EngineConfig.of(draft, tokenizer, options), strings, tokenizer)


def _generate_locals() -> dict[str, Any]:
    """The arguments of `generate` that transformers 5 does not hand over to a callable.

    They are read from its frame: a streamer that nobody ends would make its reader wait for ever, and a draft model
    that nobody uses would be ignored in silence.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the standard way to a caller's frame
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
        frame = frame.f_back
    return {}


def _refuse_arguments(model: Any, input_ids: Tensor, given: dict[str, Any], caller: dict[str, Any]) -> None:
    """Refuse arguments of `generate`, and inputs of the model's forward pass, that the engine cannot use."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"{type(model).__name__} is an encoder-decoder model, and this engine is for decoder-only models: leave "
            "custom_generate out"
        )
    if caller.get("assistant_model") is not None:
        raise UserError("assistant_model is not handed over by transformers: give it as speculative(draft=...)")
    if caller.get("synced_gpus"):
        raise UserError(
            "synced_gpus is set: a model that is spread over processes cannot be read here; gather it first"
        )
    for name in cache_names():
        cache = given.get(name)
        filled = cache is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length() > 0
        if filled or getattr(cache, "_is_user_defined", False):
            raise UserError(
                f"{name} was given: the engine keeps keys and values in a cache of its own and reads the whole prompt; "
                "leave it out, and give all tokens as input_ids"
            )
    if not input_ids.shape[1]:
        raise UserError("input_ids are empty: give token ids (inputs_embeds alone cannot be continued here)")
    known = {"attention_mask", "position_ids", *_OURS, *cache_names()}
    for name, value in given.items():
        if name not in known and value is not None:
            raise UserError(
                f"{name} was given to the model's forward pass: the engine reads token ids only; leave it out, or "
                "generate without custom_generate"
            )


def _as_dict(model: Any, sequences: Tensor, mask: Tensor | None, steps: int, config: Any, processors: Any) -> Any:
    from transformers.generation import utils

    logits = scores = None
    if config.output_logits or config.output_scores:
        rows = _logits(model, sequences, mask, steps)
        logits = tuple(rows[:, step].clone() for step in range(steps))
        if config.output_scores:
            start = sequences.shape[1] - steps
            each = enumerate(logits)
            scores = tuple(processors(sequences[:, : start + step], row.clone()) for step, row in each)
    output: Any = utils.GenerateDecoderOnlyOutput  # its annotations are narrower than what it holds
    return output(sequences=sequences, scores=scores, logits=logits if config.output_logits else None)


def _logits(
    model: Any, sequences: Int[Tensor, "rows length"], mask: Tensor | None, steps: int
) -> Float[Tensor, "rows steps vocab"]:
    """The model's own logits for the last tokens of finished sequences, float32, by one pass."""
    ids = sequences[:, :-1]
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if mask is not None:
        whole = torch.cat([mask, mask.new_ones(ids.shape[0], ids.shape[1] - mask.shape[1])], -1)
        inputs["attention_mask"] = whole
        if "position_ids" in accepted:
            inputs["position_ids"] = (whole.long().cumsum(-1) - 1).masked_fill(whole == 0, 0)
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = steps
    found: Tensor = model(**inputs).logits
    return found[:, -steps:].to(torch.float32)
