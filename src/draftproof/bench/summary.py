"""Summaries of a run's records: one for each method in each setting, compared with its baselines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftproof.bench import measures, quality
from draftproof.bench.cell import OURS, Cell
from draftproof.bench.estimate import Estimate
from draftproof.bench.measures import Shape
from draftproof.bench.quality import Scores, read_scores
from draftproof.bench.record import Record, by_cell, read_records
from draftproof.bench.run import read_metadata

PLAIN = "plain"
BASES = (PLAIN, "transformers", "transformers-assisted", "transformers-lookup")
# In a method's name only where they differ within a table.
_WHERE_THEY_DIFFER = ("draft", "dtype", "draft_dtype", "backend")


@dataclass(frozen=True)
class Setting:
    """The values that the methods of one table share; a table adds up all seeds."""

    dataset: str
    target: str
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int

    @property
    def title(self) -> str:
        """The heading of its tables."""
        cuts = [f"top-k {self.top_k}"] if self.top_k > 0 else []
        cuts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([self.target, self.dataset, f"temperature {self.temperature:g}", *cuts])


@dataclass(frozen=True)
class Summary:
    """One method in one setting."""

    setting: Setting  # shared with the other methods of its table
    method: str  # its name in tables
    effective: dict[str, int]  # as the engine reported it, with the number of answers
    lossless: bool  # whether its output distribution is the target's
    records: Sequence[Record]  # that it is computed from
    speed: dict[str, Estimate]  # over each measured baseline but itself, paired by question
    decoding: dict[str, Estimate]  # the same after the first round of each answer, which also reads the prompt
    gain: Estimate | None  # tokens per target call over rule token, one chain and the same stopper
    agrees: tuple[int, int] | None  # answers with the tokens of plain decoding, and compared; None when sampling
    flops: float | None  # a token by SPRINTER's counting; None if not known
    likelihood: Estimate | None = None  # log-probability a token under the target; None if not scored
    rouge: Estimate | None = None  # ROUGE-L against plain answers, if scored; None without the package

    @property
    def cell(self) -> Cell:
        """Its first cell; others differ in the seed."""
        return self.records[0].cell

    def counts(self) -> dict[str, Any]:
        """Figures that are the same in a second run with the same seeds."""
        return {
            "block_efficiency": measures.block_efficiency(self.records).to_dict(),
            "mean_accepted": measures.mean_accepted(self.records).to_dict(),
            "verification_rate": measures.verification_rate(self.records).to_dict(),
            "gain_over_token": _or_none(self.gain),
            "discard_rate": measures.discard_rate(self.records).to_dict(),
            "accepted_lengths": measures.histogram(self.records),
            "acceptance_by_position": measures.acceptance_by_position(self.records),
            "flops_per_token": self.flops,
            "log_likelihood": _or_none(self.likelihood),
            "rouge_l": _or_none(self.rouge),
            "same_tokens_as_plain": None if self.agrees is None else list(self.agrees),
            "tokens": sum(record.answer.tokens for record in measures.first(self.records)),
        }

    def times(self) -> dict[str, Any]:
        """Figures of time and memory."""
        peaks = [record.answer.peak_memory for record in self.records if record.answer.peak_memory is not None]
        return {
            "tokens_per_second": measures.tokens_per_second(self.records).to_dict(),
            "speed": {name: found.to_dict() for name, found in self.speed.items()},
            "decoding": {name: found.to_dict() for name, found in self.decoding.items()},
            "time_split": measures.time_split(self.records),
            "peak_memory": max(peaks, default=None),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        named = {**vars(self.setting), "method": self.method, "effective": self.effective, "lossless": self.lossless}
        return {**named, "cell": self.cell.to_dict(), **self.counts(), **self.times()}


def _or_none(found: Estimate | None) -> dict[str, float | None] | None:
    return None if found is None else found.to_dict()


def summarize(out: Path) -> tuple[list[Summary], dict[str, Any]]:
    """The summaries and the metadata of a run's folder."""
    metadata = read_metadata(out)
    shapes = {name: model["shape"] for name, model in metadata["models"].items()}
    return summaries(read_records(out), shapes, read_scores(out)), metadata


def summaries(
    records: Sequence[Record], shapes: Mapping[str, Shape | None], scores: Scores | None = None
) -> list[Summary]:
    """One summary for each method of each setting, in the order of the first records."""
    cells: dict[Setting, list[Cell]] = {}
    for cell in by_cell(records):
        cells.setdefault(_setting(cell), []).append(cell)
    named = {cell: name for own in cells.values() for cell, name in _names(own).items()}
    tables: dict[Setting, dict[str, list[Record]]] = {setting: {} for setting in cells}
    for record in records:
        tables[_setting(record.cell)].setdefault(named[record.cell], []).append(record)
    return [
        _summary(setting, method, table, shapes, scores or {}) for setting, table in tables.items() for method in table
    ]


def _setting(cell: Cell) -> Setting:
    return Setting(**{name: getattr(cell, name) for name in Setting.__dataclass_fields__})


def _names(cells: Sequence[Cell]) -> dict[Cell, str]:
    """The name of each cell in a table: its method, and the values in which it differs from other cells."""
    vary = [name for name in _WHERE_THEY_DIFFER if len({getattr(cell, name) for cell in cells} - {None}) > 1]
    made = {}
    for cell in cells:
        also = {name: str(getattr(cell, name)) for name in vary if name != "backend" or cell.engine == OURS}
        if also.get("draft_dtype") == "auto":
            del also["draft_dtype"]
        made[cell] = " ".join([cell.method, *(f"[{word}]" for word in also.values() if word != "None")])
    same_name: dict[str, set[Cell]] = {}
    for cell, name in made.items():
        same_name.setdefault(name, set()).add(replace(cell, seed=0))
    # Heads of the same name in two directories are shown with the whole option.
    return {
        cell: name if len(same_name[name]) == 1 else f"{name} [{cell.drafter}, {cell.stopper}]"
        for cell, name in made.items()
    }


def _summary(
    setting: Setting,
    method: str,
    table: Mapping[str, Sequence[Record]],
    shapes: Mapping[str, Shape | None],
    scores: Scores,
) -> Summary:
    own = table[method]
    cell = own[0].cell
    bases = _bases(cell, table)
    plain = bases.get(PLAIN)
    others = {name: base for name, base in bases.items() if base is not own}
    agrees = measures.same_tokens(own, plain) if setting.temperature == 0 and plain is not None else None
    likelihood = quality.likelihood(own, scores)
    scored = likelihood is not None and plain is not None and plain is not own
    return Summary(
        setting=setting,
        method=method,
        effective=dict(Counter(record.answer.method for record in own)),
        lossless=cell.lossless,
        records=own,
        speed={name: measures.speed_ratio(own, base) for name, base in others.items()},
        decoding={name: measures.speed_ratio(own, base, measures.decoding_speed) for name, base in others.items()},
        gain=_gain(cell, own, table),
        agrees=agrees if plain is not own else None,
        flops=measures.flops_per_token(own, shapes),
        likelihood=likelihood,
        rouge=quality.rouge(own, plain) if scored and plain is not None else None,
    )


def _gain(cell: Cell, own: Sequence[Record], table: Mapping[str, Sequence[Record]]) -> Estimate | None:
    """Tokens per target call divided by those of token verification of one chain with the same drafter and stopper."""
    if cell.engine != OURS or cell.plain:
        return None
    shared = ("target", "draft", "stopper", "dtype", "draft_dtype", "backend")
    single = cell.drafter if cell.drafts == 1 and not cell.drafter.startswith("tree") else "model"
    for records in table.values():
        other = records[0].cell
        same = all(getattr(other, name) == getattr(cell, name) for name in shared)
        if same and (other.drafter, other.verifier) == (single, "token") and records is not own:
            return measures.efficiency_ratio(own, records)
    return None


def _bases(cell: Cell, table: Mapping[str, Sequence[Record]]) -> dict[str, Sequence[Record]]:
    """The baselines of a cell: plain decoding and other engines on the same dtype, each at its fastest setting."""
    found: dict[str, Sequence[Record]] = {}
    for name in BASES:
        there = [records for records in table.values() if _is_base(name, cell, records[0].cell)]
        if there:
            found[name] = max(there, key=lambda records: measures.tokens_per_second(records).value)
    return found


def _is_base(name: str, cell: Cell, other: Cell) -> bool:
    ours = name == PLAIN
    if other.dtype != cell.dtype or other.engine != (OURS if ours else name):
        return False
    return not ours or (other.plain and (cell.engine != OURS or other.backend == cell.backend))
