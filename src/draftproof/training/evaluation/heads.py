"""Trained heads on held-out prompts: how well they predict, what their stoppers gain, and what SPRINTER costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.engine.request import Output
from draftproof.engine.stopper_parts import SHIPPED_HEADS
from draftproof.errors import UserError
from draftproof.heads import Head, load_head
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, without_directory
from draftproof.results import Results, mean_and_deviation, table
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.trained import Approximate
from draftproof.training import sprinter, sweep
from draftproof.training.evaluation.pair import about
from draftproof.training.head_options import Material
from draftproof.training.heads import Labels, evaluate_head
from draftproof.training.pair_data import PairData
from draftproof.training.sweep import Trial, rates

RUN = 64  # most tokens of a run of the engine
THRESHOLDS = (0.9, 0.7, 0.5, 0.3, 0.1)  # of SPRINTER's verifier
MEASURES = {
    "rows": "rows",
    "kl_unweighted": "binary KL",
    "kl": "binary KL as trained",
    "kl_constant": "KL, constant",
    "kl_max_probability": "KL, max probability",
    "kl_max_probability_fitted": "the same through a fitted curve",
    "ece_unweighted": "ECE",
    "huber": "Huber loss",
    "huber_constant": "Huber, constant",
    "auc": "AUC",
    "auc_max_probability": "AUC, max probability",
    "eta_tp": "eta_TP",
    "eta_fp": "eta_FP",
}
QUALITY = {
    "verification_rate": "target calls per token",
    "block_efficiency": "tokens per target call",
    "log_likelihood": "target's log-likelihood per token",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
}
RATES = ("discard_rate", "verification_rate")
Figures = dict[str, Any]


@dataclass(frozen=True)
class HeadOptions:
    """What is evaluated.

    Attributes:
        target, draft, dtype: the pair of models.
        heads: directory of the heads; without it those that ship for the draft model.
        kinds: stopper of the head, a directory in it.
        texts: text, split as in training; only the tenth that is for tests is evaluated.
        form: how texts stand in .txt files.
        limit: how many texts to use; without it all.
        seeds: seed of responses and draws.
        trials: held-out prompts that the engine continues.
        tokens: most tokens of a response.
    """

    target: str
    draft: str
    texts: Sequence[Path]
    heads: Path | None = None
    kinds: Sequence[str] = ("acceptance", "ratio", "approximate")
    form: str = "stories"
    limit: int | None = None
    dtype: str = "float32"
    seeds: Sequence[int] = (0, 1, 2)
    trials: int = 16
    tokens: int = 128

    def load(self) -> dict[str, Head]:
        """The heads by kind."""
        where = self.heads or SHIPPED_HEADS.get(self.draft)
        if where is None:
            raise UserError(f"no head ships for the draft model {self.draft!r}: name their directory with --heads")
        found = {name: load_head(where / name).eval() for name in self.kinds if (where / name).is_dir()}
        if not found:
            raise UserError(f"{where} holds no head: expected are directories named {', '.join(self.kinds)}")
        return found


def evaluate_heads(options: HeadOptions, *, watch: Watch = silent) -> Results:
    """Predictions, stopping and quality of every head, for each seed."""
    facts, heads = run_facts(), options.load()
    found: Figures = {"evaluated": [], "stopping": [], "sprinter": [], "predicted": []}
    with watch("evaluating", len(options.seeds) * len(heads), 0) as tick:
        for seed in options.seeds:
            data = _data(options, seed)
            known, rows = (data.head_rows(part, None) for part in ("valid", "test"))
            trial = data.trial(options.trials, RUN, part="test")
            fixed = {rule: sweep.fixed_table(trial, rule) for rule in ("token", "block")}
            for name, head in heads.items():
                if head.config.kind == "verifier":
                    _add_verifier(found, name, head, data, trial, seed)
                else:
                    rule = "token" if head.config.kind == "acceptance" else "block"
                    evaluated = _without_curves(evaluate_head(head, rows, known, Labels()))
                    found["evaluated"].append({"seed": seed, "head": name, **evaluated})
                    found["stopping"].append({"seed": seed, "head": name, **_stopping(trial, head, rule, fixed[rule])})
                tick(len(found["evaluated"]))
    title = f"Heads for {without_directory(options.draft)} under {without_directory(options.target)}"
    return Results(f"{title} on held-out prompts", _lines(options, found), found, facts)


def _data(options: HeadOptions, seed: int) -> PairData:
    return PairData(
        Material(
            options.target,
            options.draft,
            tuple(options.texts),
            params=SamplingParams(max_tokens=options.tokens),
            seed=seed,
            form=options.form,
            prompts=options.limit,
            dtype=options.dtype,
        )
    )


def _add_verifier(found: Figures, name: str, head: Head, data: PairData, trial: Trial, seed: int) -> None:
    test, valid = (data.verifier_rows(part)[0] for part in ("test", "valid"))
    found["evaluated"].append(
        {"seed": seed, "head": name, **_without_curves(evaluate_head(head, test, valid, Labels()))}
    )
    found["predicted"].append(sprinter.predict(head, data.draft_rows_above("test"), Labels()))
    found["sprinter"] += [{"seed": seed, **row} for row in _quality(trial, head, data.tokenizer)]


def _stopping(trial: Trial, head: Head, rule: str, fixed: list[Figures]) -> Figures:
    """A head's stopper at every threshold beside fixed lengths."""
    mine = sweep.head_table(trial, head, rule)
    return {
        "rule": rule,
        "fixed": fixed,
        "heads": sweep.with_fixed_drafts(fixed, mine),
        "dominated": sweep.dominated(fixed, mine),
        "costs": sweep.compare_latency(fixed, mine),
    }


def _without_curves(evaluated: Figures) -> Figures:
    return {name: value for name, value in evaluated.items() if not isinstance(value, list)}


def _quality(trial: Trial, head: Head, tokenizer: Any) -> list[Figures]:
    """SPRINTER at several thresholds: target calls per token and quality."""
    reference, second = (trial.run(FixedLength(4), "block", shift=shift) for shift in (0, 1))

    def row(name: str, outputs: Sequence[Output]) -> Figures:
        scores = sprinter.rouge(outputs, second, tokenizer) or {}
        likely = sprinter.log_likelihood(trial.pair, outputs, trial.prompts)
        return {"setting": name, **rates(outputs), "log_likelihood": likely, **scores}

    tried = [row(f"tau {tau:g}", trial.run(Approximate(head, tau), "last_token")) for tau in THRESHOLDS]
    return [row("lossless, fixed:4", reference), *tried]


def _lines(options: HeadOptions, found: Figures) -> list[str]:
    kinds = list(dict.fromkeys(row["head"] for row in found["evaluated"]))
    rows = []
    for key, name in MEASURES.items():
        values = [
            [float(row[key]) for row in found["evaluated"] if row["head"] == kind and key in row] for kind in kinds
        ]
        if any(values):
            rows.append((name, *(mean_and_deviation(part) if part else "" for part in values)))
    lines = [about(options.texts, options.seeds), "", *table(("measure", *kinds), rows)]
    for kind in kinds:
        mine = [row for row in found["stopping"] if row["head"] == kind]
        lines += ["", *_stopping_lines(kind, mine)] if mine else []
    return lines + (["", *_quality_lines(found)] if found["sprinter"] else [])


def _stopping_lines(kind: str, mine: list[Figures]) -> list[str]:
    """A head's stopper beside every fixed length."""
    rows = []
    for place, row in enumerate(mine[0]["fixed"]):
        each = [part["fixed"][place] for part in mine]
        rows.append(
            (f"fixed:{row['length']}", *(mean_and_deviation([one[rate] for one in each]) for rate in RATES), "")
        )
    for place, row in enumerate(mine[0]["heads"]):
        each = [part["heads"][place] for part in mine]
        beside = [
            one["verification_rate"] - one["fixed_verification_rate"] for one in each if one["fixed_verification_rate"]
        ]
        shown = [mean_and_deviation([one[rate] for one in each]) for rate in RATES]
        rows.append((f"{kind}:{row['threshold']:g}", *shown, mean_and_deviation(beside) if beside else "outside"))
    costs = []
    for place, row in enumerate(mine[0]["costs"]):
        ratios = [part["costs"][place]["head"] / part["costs"][place]["fixed"] for part in mine]
        costs.append((f"{row['cost_ratio']:g} of a target pass", mean_and_deviation(ratios)))
    dominated = ["; ".join(map(str, part["dominated"])) or "none" for part in mine]
    return [
        f"## `{kind}` beside fixed lengths ({mine[0]['rule']} verification)",
        "",
        *table(("setting", "discard rate", "verification rate", "minus fixed at that discard rate"), rows),
        "",
        f"Fixed lengths that some threshold beats at both rates, by seed: {', '.join(dominated)}.",
        "",
        *table(("a draft pass costs", "best threshold over best fixed length"), costs),
    ]


def _quality_lines(found: Figures) -> list[str]:
    rows = []
    keys = [key for key in QUALITY if key in found["sprinter"][0]]
    for name in dict.fromkeys(row["setting"] for row in found["sprinter"]):
        mine = [row for row in found["sprinter"] if row["setting"] == name]
        rows.append((name, *(mean_and_deviation([row[key] for row in mine]) for key in keys)))
    predicted = mean_and_deviation([row["block_efficiency"] for row in found["predicted"]], 2)
    return [
        "## SPRINTER: quality and target calls",
        "",
        *table(("setting", *(QUALITY[key] for key in keys)), rows),
        "",
        f"Theorem 3.3 predicts {predicted} tokens per target call at the verifier's own threshold. ROUGE is against",
        "a second lossless sample, so the first line is what chance alone gives.",
    ]
