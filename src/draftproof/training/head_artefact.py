"""Training a head from its options to its directory: heads of kind acceptance and log_ratio, and verifiers.

OUT is written whole or not at all. Until then everything is in OUT.work and in the cache, and the same command
continues an interrupted run.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftproof.files import remembered, whole_directory, write_json
from draftproof.heads import Head, HeadConfig, save_head
from draftproof.progress import Watch, silent
from draftproof.provenance import FILE, digest, model_name, provenance
from draftproof.theory.cost import PassCosts
from draftproof.training import sprinter, sweep
from draftproof.training.features import JudgeRows
from draftproof.training.head_options import HeadJob
from draftproof.training.heads import evaluate_head, train_head
from draftproof.training.loop import Record
from draftproof.training.pair_data import PairData
from draftproof.training.sweep import Trial

METRICS = "metrics.json"
RULES = {"acceptance": "token", "log_ratio": "block"}  # the verification rule whose acceptance a kind of head predicts
_SUMMARY = (
    "rows", "kl", "kl_unweighted", "kl_constant", "kl_max_probability", "kl_max_probability_fitted", "ece",
    "ece_unweighted", "huber", "huber_constant", "explained", "auc", "auc_max_probability", "eta_tp", "eta_fp",
)  # fmt: skip


def make_head(job: HeadJob, watch: Watch = silent) -> dict[str, Any]:
    """Train a head that predicts acceptance or log(p/q), choose its threshold, write its directory; returns figures."""
    run = _HeadRun(job, watch)
    rows = {part: run.data.head_rows(part, job.mix) for part in ("train", "valid")}
    trial = run.data.trial(job.trial_prompts, job.trial_tokens)
    tried: dict[str, Any] = {}
    if job.sweep:
        tried["sweep"] = run.sweep(rows, trial)
        job = run.adopt(tried["sweep"]["chosen"])
    head, history = run.train(rows)
    if job.threshold is None and not job.sweep:
        tried["thresholds"] = run.thresholds(head, trial)
        head.config = replace(head.config, threshold=tried["thresholds"]["chosen"]["threshold"])
    test = run.data.head_rows("test", None)
    metrics = {"test": evaluate_head(head, test, rows["train"], job.labels), **tried, "history": history}
    return run.write(head, metrics)


def make_verifier_head(job: HeadJob, watch: Watch = silent) -> dict[str, Any]:
    """Train the verifier of SPRINTER, compare its runs with Theorem 3.3, write its directory and return its figures."""
    run = _HeadRun(job, watch)
    (train, sizes), (valid, _), (test, _) = (run.data.verifier_rows(part) for part in ("train", "valid", "test"))
    head, history = run.train({"train": train, "valid": valid})
    trial = run.data.trial(job.trial_prompts, job.trial_tokens, part="test")
    found = sprinter.quality(trial, head, run.data.tokenizer)
    found["predicted"] = sprinter.predict(head, run.data.draft_rows_above("test"), job.labels)
    found["drift"] = sprinter.drift(head, run.data.pair, run.data.placed("test")[: job.trial_prompts])
    found["drift"]["theorem_3_1"] = found["predicted"]["eta_fp"] * found["drift"]["draft_tv"]
    metrics = {
        "test": evaluate_head(head, test, train, job.labels),
        "rows_of_each_category": sizes,
        "sprinter": found,
        "history": history,
    }
    return run.write(head, metrics)


class _HeadRun:
    """One run of a job: its data, checkpoints and start time."""

    def __init__(self, job: HeadJob, watch: Watch) -> None:
        self.start = time.perf_counter()
        self.job = job
        self.watch = watch
        self.config(64)  # refuses impossible shapes before the models are loaded
        self.data = PairData(job.material, watch)

    def config(self, width: int) -> HeadConfig:
        """The config of a head for hidden states of this width."""
        job = self.job
        draft, target = (model_name(name) for name in (job.material.draft, job.material.target))
        return HeadConfig(
            kind=job.kind,
            hidden_size=width,
            draft=draft,
            target=target,
            depth=job.depth,
            shared_blocks=job.shared_blocks,
            reads_draw=job.reads_draw,
            threshold=0.5 if job.threshold is None else job.threshold,
        )

    @property
    def identity(self) -> str:
        """A hash of everything that decides the head, which identifies the run of a checkpoint."""
        job = self.job
        facts = (job.kind, job.depth, job.shared_blocks, job.reads_draw, job.mix, job.batch, job.sweep)
        return digest(self.data.identity, facts, asdict(job.labels))

    def train(self, rows: dict[str, JudgeRows]) -> tuple[Head, list[Record]]:
        """Train a head of the job's shape, from its checkpoint if there is one; return it and its history."""
        job = self.job
        plan = replace(job.plan, seed=job.material.seed)
        return train_head(
            self.config(rows["train"].hidden.shape[-1]),
            rows["train"],
            rows["valid"],
            plan,
            job.labels,
            batch=job.batch,
            checkpoint=job.work / "checkpoint.safetensors",
            identity=self.identity,
            watch=self.watch,
        )

    # --- thresholds -----------------------------------------------------------------------------------------------

    @property
    def rule(self) -> str:
        """The verification rule of the trials."""
        return RULES[self.job.kind]

    def costs(self, trial: Trial) -> PassCosts:
        """The given cost ratio, or the costs that were measured once for this run."""
        if self.job.cost_ratio is not None:
            return PassCosts(draft=self.job.cost_ratio, target=1.0)
        few = replace(trial, prompts=trial.prompts[:4])
        return PassCosts(**remembered(self.job.work / "costs.json", lambda: asdict(sweep.measure_costs(few))))

    def fixed(self, trial: Trial) -> list[dict[str, Any]]:
        """The rates of constant lengths, which are the baseline."""
        return remembered(self._file("fixed", trial), lambda: sweep.fixed_table(trial, self.rule, watch=self.watch))

    def _file(self, name: str, trial: Trial) -> Path:
        return self.job.work / f"{name}-{digest(self.identity, trial.prompts, trial.tokens)[:12]}.json"

    def thresholds(self, head: Head, trial: Trial) -> dict[str, Any]:
        """The rates of a head at every threshold, and the threshold with the least time per token."""
        file = self._file("thresholds", trial)
        table = remembered(file, lambda: sweep.head_table(trial, head, self.rule, watch=self.watch))
        return self._chosen(trial, table)

    def _chosen(self, trial: Trial, table: list[dict[str, Any]]) -> dict[str, Any]:
        costs, fixed = self.costs(trial), self.fixed(trial)
        best = sweep.choose(sweep.with_latency(table, costs))
        return {
            "rule": self.rule,
            "costs": asdict(costs),
            "chosen": best,
            "best_fixed": sweep.choose(sweep.with_latency(fixed, costs)),
            "by_cost_ratio": sweep.compare_latency(fixed, table),
            "fixed_lengths_dominated": sweep.dominated(fixed, table),
            "fixed": fixed,
            "heads": sweep.with_fixed_drafts(fixed, table),
        }

    def sweep(self, rows: dict[str, JudgeRows], trial: Trial) -> dict[str, Any]:
        """Every depth and loss weight at every threshold (log_ratio heads have no loss weight)."""
        given, table = self.job, []
        weights = sweep.WEIGHTS if given.kind == "acceptance" else (given.labels.w_rej,)
        for weight in weights:
            for depth in sweep.DEPTHS:
                self.job = replace(given, depth=depth, labels=replace(given.labels, w_rej=weight))
                table += remembered(self._file("cell", trial), lambda: self._cell(rows, trial))
        self.job = given
        return self._chosen(trial, table)

    def _cell(self, rows: dict[str, JudgeRows], trial: Trial) -> list[dict[str, Any]]:
        """One head of the sweep: its rates at every threshold, and its validation KL."""
        job = self.job
        (job.work / "checkpoint.safetensors").unlink(missing_ok=True)
        head, _ = self.train(rows)
        (job.work / "checkpoint.safetensors").unlink(missing_ok=True)
        found = evaluate_head(head, rows["valid"], rows["train"], job.labels)
        facts = {"depth": job.depth, "w_rej": job.labels.w_rej, "valid_kl": found.get("kl", found.get("huber"))}
        return [facts | row for row in sweep.head_table(trial, head, self.rule, watch=self.watch)]

    def adopt(self, row: dict[str, Any]) -> HeadJob:
        """Replace depth, weight and threshold of the job by those of a row of the sweep; return the job."""
        labels = replace(self.job.labels, w_rej=row["w_rej"])
        self.job = replace(self.job, depth=row["depth"], labels=labels, threshold=row["threshold"])
        return self.job

    # --- the artefact ---------------------------------------------------------------------------------------------

    def write(self, head: Head, metrics: dict[str, Any]) -> dict[str, Any]:
        """Write OUT and remove OUT.work; return the summary."""
        summary = self._summary(head, metrics)
        job = self.job
        origin = provenance(
            data=[asdict(source) for source in self.data.sources],
            seed=job.material.seed,
            metrics=summary,
            seconds=time.perf_counter() - self.start,
            device=self.data.draft.device,
            models={Path(name).name: found for name, found in self.data.fingerprints.items()},
            options=self._options(),
        )
        with whole_directory(job.out) as folder:
            save_head(head.cpu(), folder)
            write_json(folder / METRICS, metrics)
            write_json(folder / FILE, origin)
        shutil.rmtree(job.work, ignore_errors=True)
        return summary

    def _options(self) -> dict[str, Any]:
        job = self.job
        sampling = {
            name: getattr(job.material.params, name) for name in ("temperature", "top_k", "top_p", "max_tokens")
        }
        return {"plan": asdict(job.plan), "labels": asdict(job.labels), "batch": job.batch, "mix": job.mix, **sampling}

    def _summary(self, head: Head, metrics: dict[str, Any]) -> dict[str, Any]:
        """The main figures."""
        found = {name: metrics["test"][name] for name in _SUMMARY if name in metrics["test"]}
        found["threshold"] = head.config.threshold
        for name in ("sweep", "thresholds"):
            if name in metrics:
                found["chosen"], found["best_fixed"] = metrics[name]["chosen"], metrics[name]["best_fixed"]
        if "sprinter" in metrics:
            found["sprinter"] = metrics["sprinter"]
        return found
