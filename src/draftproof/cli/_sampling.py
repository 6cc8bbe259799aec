"""One option for each field of SamplingParams."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from draftproof.cli._options import Options, with_options
from draftproof.sampling import SamplingParams

SAMPLING = Options(SamplingParams, "Sampling")


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `sampling` of a typer command by one option for each field of SamplingParams.

    Raises (when the command runs):
        typer.BadParameter: values that SamplingParams refuses.
    """

    @functools.wraps(command)
    def converted(*, sampling: Mapping[str, Any], **values: Any) -> Any:
        return command(**values, sampling=sampling_params(sampling))

    converted.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    return with_options(sampling=(SAMPLING,))(converted)


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from the values of the options.

    Raises:
        typer.BadParameter: a value out of range; the message names it and what is legal.
    """
    given = dict(values)
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _bias(entries: Sequence[str]) -> dict[int, float]:
    """Token id to bias from ID=VALUE entries; the last one counts for a token that is given twice."""
    found = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias is {entry!r}: legal is ID=VALUE, for example 42=-5") from None
    return found
