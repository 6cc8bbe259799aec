"""How well stoppers choose draft lengths: their discard and verification rates beside fixed lengths (SpecDec++).

All stoppers draft for the same prompts with the same seeds. Rates do not depend on the machine. The costs derived from
them use a given ratio of the times of a draft pass and a target pass (SpecDec++, arXiv 2405.19715, equation (2.3)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from draftproof.backends.base import Backend, logits_along
from draftproof.bench.model_cache import ModelCache
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.engine import Engine
from draftproof.engine.stopper_parts import SHIPPED_HEADS, make_stopper
from draftproof.engine.verifier_parts import make_verifier
from draftproof.errors import UserError, refuse_below_one
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, shown_options, without_directory
from draftproof.results import Results, mean_and_error, new_figure, save_figure, table
from draftproof.sampling import SamplingParams
from draftproof.stoppers.history import Oracle
from draftproof.theory.cost import PassCosts
from draftproof.training.features import ModelPair
from draftproof.training.sweep import LENGTHS, rates, with_fixed_drafts, with_latency

RATES = ("discard_rate", "verification_rate")
FIXED, ORACLE = "fixed", "oracle"
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class StopperComparison:
    """Options of a comparison of stoppers.

    Attributes:
        target, draft, dtype: the pair of models.
        stoppers: with their arguments, as in `generate`; None takes those of `default_stoppers`.
        verifier: the rule.
        temperature: sampling temperature; the oracle is measured at 0, where it is defined.
        costs: time of a draft pass in target passes.
        dataset, questions: of the prompts, read as plain text.
        seeds: runs of each prompt with other draws; greedy decoding needs only one.
        tokens: tokens of every answer; stop tokens are ignored.
        batch: prompts at a time.
    """

    target: str = "embedded:target"
    draft: str = "embedded:draft"
    dtype: str = "auto"
    stoppers: Sequence[str] | None = None
    verifier: str = "block"
    temperature: Sequence[float] = (1.0, 0.0)
    costs: Sequence[float] = (0.05, 0.1, 0.2, 0.4)
    dataset: str = "story-openings"
    questions: int = 8
    seeds: int = 4
    tokens: int = 96
    batch: int = 8

    def __post_init__(self) -> None:
        refuse_below_one(seeds=self.seeds, tokens=self.tokens, batch=self.batch)
        if self.stoppers is not None and not any(_family(stopper) == FIXED for stopper in self.stoppers):
            raise UserError("no fixed length to compare with: add --stopper fixed:4, for example")

    @property
    def all_stoppers(self) -> list[str]:
        """The named stoppers, or the default ones."""
        return default_stoppers(self.draft) if self.stoppers is None else list(self.stoppers)


def default_stoppers(draft: str) -> list[str]:
    """Every kind of stopper over a range of arguments; trained ones if the package has heads for the draft model."""
    kinds: dict[str, Sequence[object]] = {FIXED: LENGTHS, "schedule": (3, 5)}
    kinds |= {"confidence": _THRESHOLDS[:-1], "entropy": _THRESHOLDS[:-1]}
    if draft in SHIPPED_HEADS:
        kinds |= dict.fromkeys(("acceptance", "ratio", "approximate"), _THRESHOLDS)
    return [f"{kind}:{argument}" for kind, arguments in kinds.items() for argument in arguments]


def _family(stopper: str) -> str:
    return stopper.partition(":")[0]


def compare_stoppers(options: StopperComparison, *, watch: Watch = silent) -> Results:
    """Rates and costs of every stopper."""
    facts, stoppers = run_facts(), options.all_stoppers
    for stopper in stoppers:
        make_stopper(stopper, options.draft)  # an invalid one is refused before anything is measured
    names = (options.target, options.draft)
    target, draft, prompts = ModelCache().pair(*names, options.dtype, options.dataset, options.questions)
    rows: list[dict[str, Any]] = []
    with watch("measuring", len(options.temperature) * len(stoppers), 0) as tick:
        for at, temperature in enumerate(options.temperature):
            for number, stopper in enumerate(stoppers, 1):
                part = make_drafter("model", target=target, draft=draft, stopper=stopper)
                engine = Engine(target, part, make_verifier(options.verifier), max_batch=options.batch)
                seeds = range(options.seeds if temperature > 0 else 1)  # greedy answers have no seed
                own = [_rates(engine, prompts, options, temperature, seed) for seed in seeds]
                shown = without_directory(stopper)
                rows += [{"temperature": temperature, "stopper": shown, **row} for row in own]
                tick(at * len(stoppers) + number, tokens=sum(row["tokens"] for row in own))
            if temperature == 0:
                found = _rates(_oracle(options, target, draft, prompts), prompts, options, temperature, seed=0)
                rows.append({"temperature": 0.0, "stopper": ORACLE, **found})
    figures = {"options": shown_options(replace(options, stoppers=stoppers)), "rows": rows}
    return Results("Discard and verification rates by stopper", _lines(options, rows), figures, facts)


def _rates(
    engine: Engine, prompts: Sequence[Sequence[int]], options: StopperComparison, temperature: float, seed: int
) -> dict[str, Any]:
    """Rates of all prompts together."""
    params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=seed, ignore_eos=True)
    return {"seed": seed, **rates(engine.generate([list(prompt) for prompt in prompts], params))}


def _oracle(options: StopperComparison, target: Backend, draft: Backend, prompts: Sequence[Sequence[int]]) -> Engine:
    """An engine that drafts up to the first token that will be rejected, known from a greedy run (Lemma 2.1)."""
    params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)
    outputs = Engine(target, max_batch=options.batch).generate([list(prompt) for prompt in prompts], params)
    agreements = {}
    for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        room = len(output.token_ids) if draft.max_positions is None else draft.max_positions - len(prompt)
        best = [] if room < 0 else logits_along(draft, prompt, output.token_ids[:-1][:room]).argmax(-1).tolist()
        agreements[place] = [mine == token for mine, token in zip(best, output.token_ids, strict=False)]
    part = ModelDrafter(ModelPair(target, draft, SamplingParams()).model(), Oracle(agreements))
    return Engine(target, part, make_verifier(options.verifier), max_batch=options.batch)


def means(rows: Sequence[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """Mean rates of each stopper at a temperature, and those of each seed."""
    made = []
    own = [row for row in rows if row["temperature"] == temperature]
    for stopper in dict.fromkeys(row["stopper"] for row in own):
        entry: dict[str, Any] = {"stopper": stopper, "family": _family(stopper)}
        for rate in RATES:
            values = [row[rate] for row in own if row["stopper"] == stopper]
            entry[rate] = fmean(values)
            entry[f"{rate}s"] = values
        made.append(entry)
    fixed = [entry for entry in made if entry["family"] == FIXED]
    return with_fixed_drafts(fixed, made)


def costs(entries: Sequence[dict[str, Any]], ratio: float) -> dict[str, float]:
    """Time per token of each stopper, in target passes; `ratio` is the time of a draft pass in target passes."""
    return {entry["stopper"]: entry["latency"] for entry in with_latency(entries, PassCosts(ratio, 1.0))}


def _lines(options: StopperComparison, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The tables at each temperature."""
    lines = [
        f"Target {without_directory(options.target)}, draft model {without_directory(options.draft)}, rule",
        f"{options.verifier}, {options.questions} prompts of {options.dataset}, {options.tokens} tokens each,",
        f"{options.seeds} seeds; mean and standard error over seeds.",
        "",
        "Discard rate: discarded drafted tokens per emitted token. Verification rate: target calls per emitted token.",
        "Against fixed: verification rate minus that of fixed lengths at the same discard rate (interpolated; below 0",
        "is better; `outside`: no fixed length has such a discard rate). Cost: time per token in target passes, where",
        "a draft pass takes that share of a target pass.",
    ]
    for temperature in options.temperature:
        entries = means(rows, temperature)
        spent = {ratio: costs(entries, ratio) for ratio in options.costs}
        heads = ("stopper", "discard rate", "verification rate", "against fixed", *(f"cost at {c:g}" for c in spent))
        cells = [
            (
                entry["stopper"],
                *(mean_and_error(entry[f"{rate}s"], 3) for rate in RATES),
                _against_fixed(entry),
                *(f"{own[entry['stopper']]:.3f}" for own in spent.values()),
            )
            for entry in entries
        ]
        lines += ["", f"## Temperature {temperature:g}", "", *table(heads, cells), "", *_best(entries, spent)]
    return lines


def _against_fixed(entry: dict[str, Any]) -> str:
    if entry["family"] == FIXED:
        return ""
    known = entry["fixed_verification_rate"]
    return "outside" if known is None else f"{entry['verification_rate'] - known:+.3f}"


def _best(entries: Sequence[dict[str, Any]], spent: dict[float, dict[str, float]]) -> list[str]:
    """The cheapest stopper of each family, with its cost divided by that of the best fixed length."""
    families: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        families.setdefault(entry["family"], []).append(entry)
    rows = []
    for family, own in families.items():
        cells = []
        for prices in spent.values():
            base = min(prices[entry["stopper"]] for entry in families[FIXED])
            best = min((entry["stopper"] for entry in own), key=prices.__getitem__)
            cells.append(f"{best}: {prices[best] / base:.3f}")
        rows.append((family, *cells))
    heads = ("family", *(f"best at {ratio:g}" for ratio in spent))
    note = "The cheapest stopper of each family, and its cost divided by that of the best fixed length."
    return [*table(heads, rows), "", note]


def draw(options: StopperComparison, results: Results, out: Path) -> None:
    """Draw the verification rate over the discard rate, one panel for each temperature, one line for each family."""
    figure = new_figure(6.0 * len(options.temperature), 4.5)
    panels = figure.subplots(1, len(options.temperature), squeeze=False)[0]
    for panel, temperature in zip(panels, options.temperature, strict=True):
        entries = means(results.figures["rows"], temperature)
        for family in dict.fromkeys(entry["family"] for entry in entries):
            own = sorted((e for e in entries if e["family"] == family), key=lambda e: float(e["discard_rate"]))
            x, y = ([entry[rate] for entry in own] for rate in RATES)
            panel.plot(x, y, marker="o", markersize=4, label=family, linewidth=2 if family == FIXED else 1)
        panel.set_xlabel("discard rate (discarded drafted tokens per emitted token)")
        panel.set_ylabel("verification rate (target calls per emitted token)")
        panel.set_title(f"temperature {temperature:g}", fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend()
    save_figure(figure, out, dpi=110)
