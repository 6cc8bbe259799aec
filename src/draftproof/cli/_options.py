"""Command-line options from the fields of dataclasses: name, type and default, and help from the class's docstring."""

from __future__ import annotations

import functools
import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

NONE = object()  # the explicit value "none"; None itself means that the option was not given
_ATTRIBUTE = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Options:
    """Fields of a dataclass that become options of a command; the class's docstring describes each of them.

    Attributes:
        panel: heading of these options in the help.
        only: the fields to use; all fields if empty.
        names, defaults, help: overrides of the field's own, by field.
        metavars: names of values in the help, by field.
        short: short names of options, such as "-n", by field.
        partial: leave out options with the value None, which were not given.
        repeatable: say in the help of a list option that it can be repeated, and what its default is.
    """

    of: type
    panel: str | None = None
    only: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    help: Mapping[str, str] = field(default_factory=dict)
    metavars: Mapping[str, str] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    repeatable: bool = False

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options as parameters of a typer command, by field."""
        texts = {**field_help(self.of), **self.help}
        found = {each.name: each for each in fields(self.of)}
        return {name: self._parameter(found[name], texts[name]) for name in self.only or found}

    def kind(self, name: str) -> Any:
        """The type of a field's option; a list if it can be repeated."""
        return next(_KINDS[str(each.type)][0] for each in fields(self.of) if each.name == name)

    def _parameter(self, of: Field[Any], text: str) -> inspect.Parameter:
        kind, details = _KINDS[str(of.type)]
        name = self.names.get(of.name, of.name)
        dashed = name.replace("_", "-")
        metavar = self.metavars.get(of.name, details.get("metavar"))
        if self.repeatable and kind in _REPEATED:
            text = _repeated(text, self.defaults.get(of.name, of.default))
        option = typer.Option(
            f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}",
            *([self.short[of.name]] if of.name in self.short else []),
            help=text,
            rich_help_panel=self.panel,
            **{**details, **({} if metavar is None else {"metavar": metavar})},
        )
        default = self.defaults.get(of.name, inspect.Parameter.empty if of.default is MISSING else of.default)
        if kind in _REPEATED and default is not inspect.Parameter.empty:
            default = []
        return inspect.Parameter(
            name + "_" * keyword.iskeyword(name),
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )


def with_options(**groups: Sequence[Options]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace parameters of a typer command by options.

    Args:
        groups: for each parameter of the command, the options whose values it gets as a dictionary by field. A
            repeatable option that is not given is left out of the dictionary, so that the field's default applies.
    """
    partial = {(name, at) for name, group in groups.items() for one in group if one.partial for at in one.parameters()}
    added = {
        name: {at: each for one in group for at, each in one.parameters().items()} for name, group in groups.items()
    }
    options = [parameter for group in added.values() for parameter in group.values()]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name not in groups]

        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            given: dict[str, dict[str, Any]] = {name: {} for name in added}
            for name, group in added.items():
                for at, each in group.items():
                    value = values.pop(each.name)
                    if value != [] and not (value is None and (name, at) in partial):
                        given[name][at] = _value(value)
            return command(**values, **given)

        wrapped.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
        return wrapped

    return decorate


def _repeated(text: str, default: Any) -> str:
    """The help text of a repeatable option, with its default."""
    known = isinstance(default, tuple) and "without it" not in text
    values = [f"{each:g}" if isinstance(each, float) else str(each) for each in default] if known else []
    without = f"; without it {', '.join(values[:-1])}{' and ' if values[:-1] else ''}{values[-1]}" if values else ""
    return f"{text.rstrip('.')}; can be repeated{without}."


def field_help(of: type) -> dict[str, str]:
    """The description of each field in the docstring of a dataclass, with a capital letter at the start."""
    text = inspect.cleandoc(of.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    found = {name: " ".join(words.split()) for names, words in _ATTRIBUTE.findall(text) for name in names.split(", ")}
    return {name: words[:1].upper() + words[1:] for name, words in found.items()}


def _value(value: Any) -> Any:
    """The value of an option: a list as a tuple, NONE as None, other values as they are."""
    if value is NONE:
        return None
    return tuple(value) if isinstance(value, list) else value


def _whole_or_none(text: Any) -> Any:
    """An int, or NONE for "none"; defaults are passed through."""
    if text is None or text is NONE:
        return text
    if str(text).lower() == "none":
        return NONE
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected an integer or none, got {text!r}") from None


def _shape(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    chains, _, length = text.partition("x")
    try:
        return int(chains), int(length)
    except ValueError:
        raise typer.BadParameter(f"expected KxL, for example 8x4; got {text!r}") from None


def _number(text: Any) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


_REPEATED = (list[str], list[int], list[float], list[Path])
# From the annotation of a field (a string) to the type of its option and further arguments of typer.Option.
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bool": (bool, {}),
    "int": (int, {}),
    "float": (float, {}),
    "float | None": (float | None, {}),
    "int | None": (int | None, {"parser": _whole_or_none, "metavar": "INTEGER|none"}),
    "str": (str, {}),
    "str | None": (str | None, {}),
    "int | str | None": (str | None, {}),
    "str | Mapping[str, Any] | None": (str | None, {}),
    "Any": (str | None, {}),
    "Path": (Path, {"metavar": "DIR"}),
    "Path | None": (Path | None, {"metavar": "DIR"}),
    "tuple[Path, ...]": (list[Path], {"metavar": "FILE"}),
    "Sequence[int]": (list[int], {}),
    "Sequence[float]": (list[float], {}),
    "Sequence[Path]": (list[Path], {"metavar": "FILE"}),
    "Sequence[str]": (list[str], {"metavar": "TEXT"}),
    "Sequence[int] | None": (list[int], {}),
    "Sequence[float] | None": (list[float], {}),
    "Sequence[str] | None": (list[str], {"metavar": "TEXT"}),
    "Sequence[tuple[int, int]]": (list[str], {"parser": _shape, "metavar": "KxL"}),
    "tuple[str, ...]": (list[str], {"metavar": "TEXT"}),
    "str | float": (str, {"parser": _number, "metavar": "TEXT"}),
    "str | Sequence[str]": (list[str], {"metavar": "TEXT"}),
    "Mapping[int, float] | None": (list[str], {"metavar": "ID=VALUE"}),
}
