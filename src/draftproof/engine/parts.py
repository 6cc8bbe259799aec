"""The declarations of drafters, stoppers and verifiers, and the parsing of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from draftproof.engine.composition import VerifierTraits
from draftproof.errors import UserError
from draftproof.stoppers.base import Stopper
from draftproof.verifiers.base import Verifier

_Part = TypeVar("_Part", bound="Part")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The declaration of a part."""

    name: str  # as users write it
    about: str  # one line for help texts
    argument: str = ""  # the name of the argument after "name:" in help texts; empty if it takes none

    @property
    def form(self) -> str:
        """The form of a specification, such as "fixed:N"."""
        return f"{self.name}:{self.argument}" if self.argument else self.name


@dataclass(frozen=True, kw_only=True)
class StopperPart(Part):
    """The declaration of a stopper."""

    make: Callable[[str, str | None], Stopper]  # from the argument and the name of the draft model
    constant: bool = False  # whether all drafts have the same length
    head: str = ""  # the kind of trained head that it needs; empty for none
    offered: bool = True  # whether users can name it; False for the oracle, which needs a recorded run


@dataclass(frozen=True, kw_only=True)
class VerifierPart(Part):
    """The declaration of a verification rule."""

    make: Callable[[str], Verifier]  # from the argument
    traits: VerifierTraits  # which drafts it accepts
    lossless: bool = True  # whether the output distribution stays the target's


def find(parts: Mapping[str, _Part], spec: str, kind: str, offered: str) -> tuple[_Part, str]:
    """The part that "name" or "name:argument" refers to, and the argument; `kind` and `offered` are for errors."""
    name, _, argument = spec.partition(":")
    if name not in parts:
        raise UserError(f"{kind}: expected one of {offered}, got {name!r}")
    if argument and not parts[name].argument:
        raise UserError(f"{kind} {name}: expected no argument, got {argument!r}")
    return parts[name], argument


def numbers(text: str, example: str) -> list[int]:
    """Integers separated by x, such as "4x2x1"; an empty list for an empty text."""
    try:
        return [int(part) for part in text.split("x")] if text else []
    except ValueError:
        raise UserError(f"expected integers separated by x, for example {example}, got {text!r}") from None


def number(text: str, example: str) -> float:
    """The number in a text; errors show `example`."""
    try:
        return float(text)
    except ValueError:
        raise UserError(f"expected a number, for example {example}, got {text!r}") from None


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def source(argument: str) -> tuple[str, int]:
    """The directory or hub id in WHERE or WHERExK, and K (1 if it is missing)."""
    where, _, chains = argument.rpartition("x")
    if Path(argument).expanduser().exists() or not where or not chains.isdecimal():
        return argument, 1
    return where, int(chains)


def directory(argument: str) -> tuple[Path, int]:
    """The directory in DIR or DIRxK, and K (1 if it is missing)."""
    where, chains = source(argument)
    return Path(where).expanduser(), chains


def own_chain_count(argument: str) -> int:
    """The K in LxK or WHERExK; 1 if it is missing, as in the name of a directory that is there."""
    where, times, chains = argument.rpartition("x")
    if not times or not chains.isdecimal():
        return 1
    return int(chains) if not where or where.isdecimal() else source(argument)[1]


def has_several_chains(argument: str) -> bool:
    """Whether LxK or WHERExK names more than one chain."""
    return own_chain_count(argument) > 1
