"""The fields of transformers' GenerationConfig: what each becomes here, or why it is refused."""

from __future__ import annotations

from typing import Any

from draftproof.errors import UserError

_BY_PROCESSOR = "by transformers' processor, for each drafted context"
_AFTERWARDS = "computed after generating, by one pass of the model"
_BEAMS, _ASSISTED = "of beam search only", "of assisted generation only"
_CACHE = "the engine has a cache of its own: leave it out"
_DRAFTS = "another way to draft: leave it out, and name a drafter in speculative(...)"

# Each field is in one of the three tables; a test compares them with the installed version of transformers.
MAPPED = {
    "max_length": "the most tokens of a row, prompt and padding included",
    "max_new_tokens": "the most new tokens",
    "min_length": "EOS has probability 0 before",
    "min_new_tokens": "EOS has probability 0 before",
    "max_time": "checked after every token, like any stopping criterion",
    "do_sample": "False is temperature 0",
    "temperature": "`temperature`",
    "top_k": "`top_k`",
    "top_p": "`top_p`",
    "min_p": "`min_p`; with `top_p` by transformers' processors, which apply it last",
    "repetition_penalty": "`repetition_penalty`, padding left out",
    **dict.fromkeys(("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), _BY_PROCESSOR),
    **dict.fromkeys(("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"), _BY_PROCESSOR),
    **dict.fromkeys(("no_repeat_ngram_size", "bad_words_ids", "sequence_bias"), _BY_PROCESSOR),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), _BY_PROCESSOR),
    "remove_invalid_values": "by transformers' processor; NaN in the model's own logits is still an error",
    **dict.fromkeys(("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"), _BY_PROCESSOR),
    "renormalize_logits": "changes no probability",
    "watermarking_config": "by transformers' processor; the SynthID one is refused, it keeps a state",
    "num_return_sequences": "rows of the batch, drawn independently",
    **dict.fromkeys(("output_scores", "output_logits"), _AFTERWARDS),
    "return_dict_in_generate": "`GenerateDecoderOnlyOutput`; without `past_key_values`",
    "pad_token_id": "fills rows that end early",
    "bos_token_id": "an empty prompt begins with it",
    "eos_token_id": "ends a row",
}
INERT = {  # fields that transformers itself reads only for beams, encoder-decoder models or its assisted generation
    **dict.fromkeys(("early_stopping", "length_penalty"), _BEAMS),
    "decoder_start_token_id": "of encoder-decoder models only",
    "num_assistant_tokens": f"{_ASSISTED}; here `stopper` says how many tokens are drafted",
    "num_assistant_tokens_schedule": f"{_ASSISTED}; here `stopper` says how many tokens are drafted",
    "assistant_confidence_threshold": f"{_ASSISTED}; here `stopper`, for example confidence:0.4",
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), _ASSISTED),
    "max_matching_ngram_size": "of prompt lookup only; here `drafter`, for example ngram:4",
    "disable_compile": "nothing is compiled",
    "transformers_version": "says who wrote the file",
}
REFUSED = {
    "num_beams": "beams are another algorithm, which speculation does not speed up: set num_beams=1",
    "num_beam_groups": "beams are another algorithm: leave it out",
    **dict.fromkeys(("diversity_penalty", "constraints", "force_words_ids"), "of beams: leave it out"),
    "penalty_alpha": "contrastive search is another algorithm: leave it out",
    "low_memory": "of contrastive search: leave it out",
    "dola_layers": "DoLa is another algorithm: leave it out",
    "guidance_scale": "guidance keeps a cache of its own for a second prompt, which drafts would upset: leave it out",
    "use_cache": "the engine has a cache of its own, and nothing is faster without: leave it out",
    **dict.fromkeys(("cache_implementation", "cache_config", "max_cache_len"), _CACHE),
    "prefill_chunk_size": "the engine reads prompts in pieces by itself: leave it out",
    "token_healing": "it changes the prompt and needs a tokenizer: heal the prompt before the call",
    "stop_strings": "transformers hands no tokenizer over: give stop_strings and tokenizer to speculative(...), or "
    "stopping_criteria=[StopStringCriteria(tokenizer, [...])]",
    "output_attentions": "attention weights are not kept: call the model's forward on the sequences",
    "output_hidden_states": "hidden states are not kept: call the model's forward on the sequences",
    "is_assistant": "of transformers' assisted generation: leave it out",
    **dict.fromkeys(("use_mtp", "speculation_type"), _DRAFTS),
    "prompt_lookup_num_tokens": "another way to draft: use speculative(drafter='ngram:4') in its place",
    "assistant_early_exit": "another way to draft: use speculative(drafter='early_exit:LAYERS') in its place",
    "assistant_ensemble_weight": "it changes the output distribution: leave it out",
    "compile_config": "nothing is compiled: leave it out",
    "continuous_batching_config": "batches are the engine's: leave it out, and see max_batch",
}
_OFF: dict[str, tuple[Any, ...]] = {"num_beams": (1,), "num_beam_groups": (1,), "use_cache": (True,)}


def refuse_fields(config: Any) -> None:
    """Refuse what a generation config, as transformers prepares it, asks for and cannot have here."""
    for name, advice in REFUSED.items():
        value = getattr(config, name, None)
        off = (None, False, *_OFF.get(name, ())) if name != "use_cache" else (None, True)
        if value not in off and not (name in ("diversity_penalty", "guidance_scale") and value in (0, 1)):
            raise UserError(f"{name} is {value!r}: {advice}")
    known = MAPPED.keys() | INERT.keys() | REFUSED.keys()
    for name in vars(type(config)()):
        if not name.startswith("_") and name not in known and getattr(config, name, None) is not None:
            raise UserError(
                f"{name} is {getattr(config, name)!r}, a field of this version of transformers that is unknown here: "
                "leave it out"
            )
