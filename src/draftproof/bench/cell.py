"""Cells: one composition on one data set with one seed is the unit that is measured and compared."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

from draftproof.backends.loading.by_name import BACKENDS, current_name
from draftproof.backends.loading.options import draft_dtype as read_draft_dtype
from draftproof.engine.drafter_context import DrafterPart
from draftproof.engine.drafter_parts import find_drafter, make_drafter, why_not
from draftproof.engine.stopper_parts import DEFAULT_CONSTANT_STOPPER, make_stopper
from draftproof.engine.verifier_parts import DEFAULT_TREE_VERIFIER, DEFAULT_VERIFIER, LOSSY, make_verifier
from draftproof.errors import UserError, refuse_below_one, refuse_unknown
from draftproof.provenance import digest
from draftproof.sampling import SamplingParams
from draftproof.testing import TableModel

OURS = "draftproof"
ENGINES = {
    OURS: "our engine",
    "transformers": "transformers' generate, plain",
    "transformers-assisted": "transformers' assisted generation with the draft model",
    "transformers-lookup": "transformers' prompt lookup",
}
_PATH = re.compile("[^:]*/")
_REAL = ("temperature", "top_p")


@dataclass(frozen=True)
class Cell:
    """One composition on one data set with one seed."""

    target: str  # registered name, hub id, directory or .gguf file
    draft: str | None = None  # named likewise, where something reads one
    drafter: str = "none"  # with its argument, so with K: "model", "chains:4", "ngram:8"
    stopper: str = ""  # with its argument, so with n: "fixed:4"; "" where the drafter has none
    verifier: str = ""  # the rule; "" where nothing is verified
    engine: str = OURS  # a name of ENGINES
    setting: str = ""  # of another engine beside its defaults, "name=value,name=value"
    dtype: str = "auto"  # of the models
    draft_dtype: str = "auto"  # of the draft model or head, where it has another one; "int8" and "int4" quantize
    backend: str = "auto"  # of the models; only our engine has one
    dataset: str = ""  # name of the questions
    temperature: float = 0.0  # this and the following as in SamplingParams
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 64
    seed: int = 1

    def __post_init__(self) -> None:
        refuse_below_one(max_tokens=self.max_tokens)
        read_draft_dtype(self.draft_dtype, self.dtype)
        refuse_unknown("engine", self.engine, ENGINES)
        object.__setattr__(self, "backend", current_name(self.backend))
        refuse_unknown("backend", self.backend, BACKENDS)
        for name in _REAL:  # 1 and 1.0 are one cell
            object.__setattr__(self, name, float(getattr(self.params, name)))

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters, with the cell's seed."""
        names = ("temperature", "top_k", "top_p", "max_tokens", "seed")
        return SamplingParams(**{name: getattr(self, name) for name in names})

    @property
    def key(self) -> str:
        """A short digest; two cells with one key are the same measurement."""
        return digest(self.to_dict())[:16]

    @property
    def group(self) -> tuple[Any, ...]:
        """The values that cells must share to be measured in turns and compared question by question."""
        return (self.target, self.dataset, self.temperature, self.top_k, self.top_p, self.max_tokens, self.seed)

    @property
    def plain(self) -> bool:
        """Whether it decodes without drafts."""
        return self.engine == "transformers" or (self.engine == OURS and self.drafter == "none")

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is the target's."""
        return self.verifier.partition(":")[0] not in LOSSY

    @property
    def method(self) -> str:
        """Its name in tables: drafter (a directory by its last part), stopper and rule, or engine and setting."""
        if self.engine != OURS:
            return f"{self.engine} ({self.values})" if self.setting else self.engine
        if self.drafter == "none":
            return "plain"
        return ", ".join(_PATH.sub("", part) for part in (self.drafter, self.stopper, self.verifier) if part)

    @property
    def values(self) -> str:
        """The values of the setting."""
        return "/".join(part.partition("=")[2] for part in self.setting.split(",") if part)

    @property
    def length(self) -> int | None:
        """The n of a constant draft length; None where the length varies."""
        name, _, argument = self.stopper.partition(":")
        return int(argument or 4) if name == "fixed" else None

    @property
    def drafts(self) -> int:
        """The K of K chains; 1 for a single one."""
        part, argument = find_drafter(self.drafter)
        return part.chains(argument)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """The cell from what `to_dict` returned."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown or "target" not in values:
            raise UserError(f"a cell has the fields {', '.join(names)}: {', '.join(unknown) or 'target'} does not fit")
        return cls(**values)


class Matrix(NamedTuple):
    """Cells, the last list changing fastest, each once; and those that the engine refuses, with its messages."""

    cells: list[Cell]
    left_out: list[tuple[Cell, str]]


def matrix(*, strict: bool = False, **lists: Any) -> Matrix:
    """Every combination of the values of fields, as cells in their canonical form.

    `strict` raises where the engine refuses a composition, instead of leaving it out. `lists` has a value or a list of
    values for fields of `Cell`.
    """
    known = [field.name for field in fields(Cell)]
    for name in sorted(lists):
        refuse_unknown("field of a cell", name, known)
    each = {name: _as_list(name, values) for name, values in lists.items()}
    cells: dict[Cell, None] = {}
    left_out: dict[Cell, str] = {}
    for values in itertools.product(*each.values()):
        cell = canonical(Cell(**dict(zip(each, values, strict=True))))
        why = refused(cell)
        if why is None:
            cells[cell] = None
        elif strict:
            raise UserError(f"{cell.method}: {why}")
        else:
            left_out[cell] = why
    if not cells:
        raise UserError(f"no composition is left: {next(iter(left_out.values()))}")
    return Matrix(list(cells), list(left_out.items()))


def _as_list(name: str, values: Any) -> list[Any]:
    single = isinstance(values, str) or not isinstance(values, Iterable)
    made = [values] if single else list(values)
    if not made:
        raise UserError(f"no value for {name}: give at least one")
    real = name in _REAL and all(isinstance(value, int | float) for value in made)
    return [float(value) for value in made] if real else made


def canonical(cell: Cell) -> Cell:
    """The same measurement without values that have no effect: a plain cell has no rule, lookup has no draft model."""
    if cell.engine != OURS:
        assisted = cell.engine == "transformers-assisted"
        return replace(
            cell,
            draft=cell.draft if assisted else None,
            drafter="none",
            stopper="",
            verifier="",
            backend="auto",
            draft_dtype="auto",
        )
    part, argument = find_drafter(cell.drafter)
    if part.name == "none":
        return replace(cell, draft=None, drafter="none", stopper="", verifier="", setting="", draft_dtype="auto")
    rule = cell.verifier or (DEFAULT_TREE_VERIFIER if part.branches(argument) else DEFAULT_VERIFIER)
    stopper = (cell.stopper or DEFAULT_CONSTANT_STOPPER) if part.stops else ""
    draft = cell.draft if part.traits.reads_draft else None
    dtype = cell.draft_dtype if part.traits.reads_draft or part.name == "feature_head" else "auto"
    return replace(cell, draft=draft, stopper=stopper, verifier=rule, setting="", draft_dtype=dtype)


def refused(cell: Cell) -> str | None:
    """Why the engine refuses a composition; None where it runs. No model is loaded."""
    if cell.engine == "transformers-assisted" and cell.draft is None:
        return "transformers' assisted generation needs a draft model: name one with draft (--draft)"
    part, argument = find_drafter(cell.drafter)
    if cell.engine != OURS or part.name == "none":
        return None
    if part.traits.reads_draft and cell.draft is None:
        return f"drafter {part.name} needs a draft model: name one with draft (--draft)"
    if cell.stopper:
        make_stopper(cell.stopper, cell.draft)
    make_verifier(cell.verifier)
    _try_argument(part, argument)
    return why_not(cell.drafter, cell.stopper or None, cell.verifier)


@cache
def _try_argument(part: DrafterPart, argument: str) -> None:
    """Make a drafter around toy models, so that a broken argument is noticed before a model is loaded.

    Drafters inside the target need a real one; of these the argument is only read.
    """
    if part.traits.shares_cache:
        part.check(argument)
        return
    toy = TableModel(3, 0, order=1)
    spec = f"{part.name}:{argument}" if argument else part.name
    make_drafter(spec, target=toy, draft=toy if part.traits.reads_draft else None, stopper=DEFAULT_CONSTANT_STOPPER)


def datasets(cells: Sequence[Cell]) -> list[str]:
    """Names of the data sets of cells, in order."""
    return list(dict.fromkeys(cell.dataset for cell in cells))
