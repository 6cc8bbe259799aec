"""What the records of a run say: one summary a method and setting, with its baselines beside it.

Knows: which cells are one method, which is a baseline of which. Does not know: tables, words, files but the run's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftproof.bench import measures, quality
from draftproof.bench.cell import OURS, Cell
from draftproof.bench.estimate import Estimate
from draftproof.bench.flops import Shape
from draftproof.bench.origin import read_origin
from draftproof.bench.quality import Scores, read_scores
from draftproof.bench.record import Record, by_cell, read_records

PLAIN = "plain"
BASES = (PLAIN, "transformers", "transformers-assisted", "transformers-lookup")
_ASIDE = ("draft", "dtype", "backend")  # what a method's name says only where it differs within a table


@dataclass(frozen=True)
class Setting:
    """What the methods of one table share; seeds are summed over."""

    dataset: str
    target: str
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int

    @property
    def title(self) -> str:
        """In words."""
        cuts = [f"top-k {self.top_k}"] if self.top_k > 0 else []
        cuts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([self.target, self.dataset, f"temperature {self.temperature:g}", *cuts])


@dataclass(frozen=True)
class Summary:
    """One method in one setting.

    Attributes:
        setting: what it shares with the methods beside it.
        method: its name in tables.
        effective: what the engine said was in effect, and how often.
        lossless: whether its law is the target's.
        records: what it rests on.
        speed: tokens a second over each baseline that was measured, paired by question; it has none over itself.
        gain: tokens per target call over those of rule token on one chain with the same stopper; None where that was
            not measured, or is this.
        agrees: answers with the tokens of plain decoding, and of how many; None when sampling.
        flops: operations a token by SPRINTER's counting; None where not known.
        likelihood: log-probability a token under the target; None where it was not scored.
        rouge: ROUGE-L against plain answers, where likelihood is; None without the package.
    """

    setting: Setting
    method: str
    effective: dict[str, int]
    lossless: bool
    records: Sequence[Record]
    speed: dict[str, Estimate]
    gain: Estimate | None
    agrees: tuple[int, int] | None
    flops: float | None
    likelihood: Estimate | None = None
    rouge: Estimate | None = None

    @property
    def cell(self) -> Cell:
        """Its first cell; others differ in the seed."""
        return self.records[0].cell

    def counts(self) -> dict[str, Any]:
        """Figures that a second run with the same seeds repeats."""
        return {
            "block_efficiency": measures.block_efficiency(self.records).to_dict(),
            "mean_accepted": measures.mean_accepted(self.records).to_dict(),
            "verification_rate": measures.verification_rate(self.records).to_dict(),
            "gain_over_token": _told(self.gain),
            "discard_rate": measures.discard_rate(self.records).to_dict(),
            "accepted_lengths": measures.histogram(self.records),
            "acceptance_by_position": measures.acceptance_by_position(self.records),
            "flops_per_token": self.flops,
            "log_likelihood": _told(self.likelihood),
            "rouge_l": _told(self.rouge),
            "same_tokens_as_plain": None if self.agrees is None else list(self.agrees),
            "tokens": sum(record.answer.tokens for record in measures.first(self.records)),
        }

    def times(self) -> dict[str, Any]:
        """Figures of clocks and memory."""
        peaks = [record.answer.peak_memory for record in self.records if record.answer.peak_memory is not None]
        return {
            "tokens_per_second": measures.tokens_per_second(self.records).to_dict(),
            "speed": {name: found.to_dict() for name, found in self.speed.items()},
            "time_split": measures.time_split(self.records),
            "peak_memory": max(peaks, default=None),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        told = {**vars(self.setting), "method": self.method, "effective": self.effective, "lossless": self.lossless}
        return {**told, "cell": self.cell.to_dict(), **self.counts(), **self.times()}


def _told(found: Estimate | None) -> dict[str, float | None] | None:
    return None if found is None else found.to_dict()


def summarize(out: Path) -> tuple[list[Summary], dict[str, Any]]:
    """The summaries of a run's folder, and its provenance.

    Raises:
        UserError: no run there.
    """
    told = read_origin(out)
    shapes = {name: model["shape"] for name, model in told["models"].items()}
    return summaries(read_records(out), shapes, read_scores(out)), told


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
    """What a table calls each of its cells: the method, and what else tells it from others there."""
    vary = [name for name in _ASIDE if len({getattr(cell, name) for cell in cells} - {None}) > 1]
    made = {}
    for cell in cells:
        also = [str(getattr(cell, name)) for name in vary if name != "backend" or cell.engine == OURS]
        made[cell] = " ".join([cell.method, *(f"[{word}]" for word in also if word != "None")])
    meant: dict[str, set[Cell]] = {}
    for cell, name in made.items():
        meant.setdefault(name, set()).add(replace(cell, seed=0))
    # Heads of one name in two directories: the whole of what was said tells them apart.
    return {
        cell: name if len(meant[name]) == 1 else f"{name} [{cell.drafter}, {cell.stopper}]"
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
    effective: dict[str, int] = {}
    for record in own:
        effective[record.answer.method] = effective.get(record.answer.method, 0) + 1
    agrees = measures.same_tokens(own, plain) if setting.temperature == 0 and plain is not None else None
    likelihood = quality.likelihood(own, scores)
    scored = likelihood is not None and plain is not None and plain is not own
    return Summary(
        setting=setting,
        method=method,
        effective=effective,
        lossless=cell.lossless,
        records=own,
        speed={name: measures.speed_ratio(own, base) for name, base in bases.items() if base is not own},
        gain=_gain(cell, own, table),
        agrees=agrees if plain is not own else None,
        flops=measures.flops_per_token(own, shapes),
        likelihood=likelihood,
        rouge=quality.rouge(own, plain) if scored and plain is not None else None,
    )


def _gain(cell: Cell, own: Sequence[Record], table: Mapping[str, Sequence[Record]]) -> Estimate | None:
    """Tokens per target call over token verification of one chain that is drafted and stopped alike."""
    if cell.engine != OURS or cell.plain:
        return None
    wanted = ("target", "draft", "stopper", "dtype", "backend")
    single = cell.drafter if cell.drafts == 1 and not cell.drafter.startswith("tree") else "model"
    for records in table.values():
        other = records[0].cell
        same = all(getattr(other, name) == getattr(cell, name) for name in wanted)
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
