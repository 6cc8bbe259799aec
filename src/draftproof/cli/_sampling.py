"""One option for each field of SamplingParams; options that are not given have the model's defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import typer

from draftproof.cli._options import Options, field_help, with_options
from draftproof.sampling import MODEL_DEFAULTS, SamplingParams

_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
SAMPLING = Options(
    SamplingParams,
    "Sampling",
    defaults=dict.fromkeys(MODEL_DEFAULTS),
    help={
        name: f"{field_help(SamplingParams)[name].rstrip('.')}; without it the model's own, else {_DEFAULTS[name]}."
        for name in MODEL_DEFAULTS
    },
    metavars={"stop_token_ids": "ID"},
    partial=True,
)


# A model that repeats itself, as small ones do at temperature 0, never ends its answer.
CHAT_TOKENS = 4096
# For a conversation: one answer at a time, and no log-probabilities.
CHAT_SAMPLING = replace(
    SAMPLING,
    only=[name for name in _DEFAULTS if name not in ("n", "logprobs", "logprobs_mode", "prompt_logprobs")],
    help={
        **SAMPLING.help,
        "max_tokens": f"The most tokens of an answer; without it {CHAT_TOKENS}, with none the whole context.",
    },
)


def sampling_options(command: Callable[..., Any], *, options: Options = SAMPLING) -> Callable[..., Any]:
    """Replace the parameter `sampling` of a typer command by an option for each field; it gets those that are given."""

    @functools.wraps(command)
    def converted(*, sampling: Mapping[str, Any], **values: Any) -> Any:
        return command(**values, sampling=given_values(sampling))

    converted.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    return with_options(sampling=(options,))(converted)


def given_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams from option values; raises typer.BadParameter for values out of range."""
    given = dict(values)
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    merged_params(given, SamplingParams(max_tokens=None) if "max_tokens" not in given else SamplingParams())
    return given


def merged_params(given: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """A model's defaults, overridden by the given values; raises typer.BadParameter for values out of range."""
    try:
        return replace(defaults, **given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _bias(entries: Sequence[str]) -> dict[int, float]:
    """Biases by token id, from ID=VALUE entries; the last entry of a token counts."""
    found = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias: expected ID=VALUE, for example 42=-5, got {entry!r}") from None
    return found
