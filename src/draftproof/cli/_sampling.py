"""One option for each field of SamplingParams, made from the class itself, so that nothing is said twice.

Knows: how a field's type, default and docstring become an option. Does not know: what the fields mean.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from draftproof.sampling import SamplingParams

_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `sampling` of a typer command by one option for each field of SamplingParams.

    Raises (when the command runs):
        typer.BadParameter: values that SamplingParams refuses.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "sampling"]
    added = sampling_parameters()
    names = [parameter.name for parameter in added]

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        sampling = sampling_params({name: values.pop(name) for name in names})
        return command(**values, sampling=sampling)

    wrapped.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    return wrapped


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters that option values ask for; an option that can be repeated and is not given is the default.

    Raises:
        typer.BadParameter: a value of the wrong range; the message names it and what is legal.
    """
    given = {name: value for name, value in values.items() if not (isinstance(value, list) and not value)}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def sampling_parameters() -> list[inspect.Parameter]:
    """The options as parameters of a typer command: name, type and default of the field, help of its docstring."""
    said = field_help()
    return [_parameter(field, said.get(field.name)) for field in fields(SamplingParams)]


def field_help() -> dict[str, str]:
    """What the docstring of SamplingParams says of each field."""
    text = inspect.cleandoc(SamplingParams.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    return {name: said[:1].upper() + " ".join(said[1:].split()) for name, said in _ATTRIBUTE.findall(text)}


def _parameter(field: Field[Any], said: str | None) -> inspect.Parameter:
    assert field.default is not MISSING, f"SamplingParams.{field.name} needs a default: every option has one"
    kind, details = _KINDS[str(field.type)]
    dashed = field.name.replace("_", "-")
    option = typer.Option(
        f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}",
        help=said,
        rich_help_panel="Sampling",
        **details,
    )
    default = [] if kind in _REPEATED else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _whole_or_none(text: Any) -> int | None:
    """An int, or None for "none"; defaults come as they are."""
    if text is None or str(text).lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor none") from None


def _bias(entries: Sequence[str]) -> dict[int, float]:
    """Token id to bias of ID=VALUE entries; of two for one token the last one holds."""
    found = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias is {entry!r}: legal is ID=VALUE, for example 42=-5") from None
    return found


_REPEATED = (list[str], list[int])
# From a field's annotation (a string: the class is exempt from type checks) to its option's type and details.
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bool": (bool, {}),
    "int": (int, {}),
    "float": (float, {}),
    "int | None": (int | None, {"parser": _whole_or_none, "metavar": "INTEGER|none"}),
    "Sequence[int]": (list[int], {"metavar": "ID"}),
    "Sequence[str]": (list[str], {"metavar": "TEXT"}),
    "str | Sequence[str]": (list[str], {"metavar": "TEXT"}),
    "Mapping[int, float] | None": (list[str], {"metavar": "ID=VALUE"}),
}
