"""From options to an artefact: heads of kind acceptance and log_ratio, and verifiers.

Knows: the order of the work, what an artefact's files hold. Does not know: how any of it is done.

OUT appears whole, or not at all. Until then everything lies in OUT.work and in the cache, and the same command takes it
up again.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftproof.errors import UserError
from draftproof.files import whole_directory
from draftproof.heads import Head, HeadConfig, save_head
from draftproof.progress import Watch, silent
from draftproof.provenance import FILE, digest, provenance, write_json
from draftproof.theory.cost import PassCosts
from draftproof.training import sprinter, sweep
from draftproof.training.features import JudgeRows
from draftproof.training.heads import Labels, judge, train_head
from draftproof.training.loop import Record, TrainingPlan
from draftproof.training.pair_data import Material, PairData
from draftproof.training.sweep import Trial, remembered

METRICS = "metrics.json"
RULES = {"acceptance": "token", "log_ratio": "block"}  # the rule that a kind of head predicts
_SUMMARY = (
    "rows", "kl", "kl_unweighted", "kl_constant", "kl_max_probability", "kl_max_probability_fitted", "ece",
    "ece_unweighted", "huber", "huber_constant", "explained", "auc", "auc_max_probability", "eta_tp", "eta_fp",
)  # fmt: skip


@dataclass(frozen=True)
class HeadJob:
    """What shall be trained, and where it goes.

    Attributes:
        material: models and data.
        out: directory to make.
        kind, depth, shared_blocks, reads_draw: see HeadConfig.
        labels: weights and lambda.
        plan: steps and learning rate.
        batch: rows a step.
        mix: share r of the target's tokens in token mixing (0.15 in SpecDec++; None: on the draft's own continuations.
        threshold: h or tau; None picks h by the cost model.
        sweep: try every depth and weight, and take the best.
        cost_ratio: t_draft/t_target; None measures both.
        trial_prompts: prompts of a trial in the engine.
        trial_tokens: most tokens of each response there.
    """

    material: Material
    out: Path
    kind: str = "acceptance"
    depth: int = 3
    shared_blocks: bool = False
    reads_draw: bool = False
    labels: Labels = Labels()  # noqa: RUF009 - frozen
    plan: TrainingPlan = TrainingPlan(steps=4000, learning_rate=3e-3, warmup=50)  # noqa: RUF009 - frozen
    batch: int = 512
    mix: float | None = None
    threshold: float | None = None
    sweep: bool = False
    cost_ratio: float | None = None
    trial_prompts: int = 32
    trial_tokens: int = 64

    def __post_init__(self) -> None:
        if self.mix is not None and not 0 <= self.mix < 1:
            raise UserError(f"mix is {self.mix:g}: legal is 0 or more and less than 1")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UserError(f"threshold is {self.threshold:g}: legal are 0 to 1")
        if self.cost_ratio is not None and not 0 < self.cost_ratio < 1:
            raise UserError(f"cost ratio is {self.cost_ratio:g}: legal is between 0 and 1")
        if self.batch < 1 or self.trial_prompts < 1:
            raise UserError(f"batch is {self.batch}, trial prompts {self.trial_prompts}: legal are 1 or more")
        if self.out.exists():
            raise UserError(f"{self.out} exists already: name a path that does not, or remove it first")

    @property
    def work(self) -> Path:
        """Where checkpoints lie until the artefact is made."""
        return self.out.parent / f"{self.out.name}.work"


def make_head(job: HeadJob, watch: Watch = silent) -> dict[str, Any]:
    """Train a head that predicts acceptance or log(p/q), choose its threshold, and write its directory.

    Returns:
        The figures that sum it up, as in its provenance.

    Raises:
        UserError: something that cannot be used or does not fit, before long work wherever possible.
    """
    run = _Job(job, watch)
    rows = {part: run.shop.head_rows(part, job.mix) for part in ("train", "valid")}
    trial = run.shop.trial(job.trial_prompts, job.trial_tokens)
    tried: dict[str, Any] = {}
    if job.sweep:
        tried["sweep"] = run.sweep(rows, trial)
        job = run.adopt(tried["sweep"]["chosen"])
    head, history = run.train(rows)
    if job.threshold is None and not job.sweep:
        tried["thresholds"] = run.thresholds(head, trial)
        head.config = replace(head.config, threshold=tried["thresholds"]["chosen"]["threshold"])
    test = run.shop.head_rows("test", None)
    metrics = {"test": judge(head, test, rows["train"], job.labels), **tried, "history": history}
    return run.write(head, metrics)


def make_verifier_head(job: HeadJob, watch: Watch = silent) -> dict[str, Any]:
    """Train SPRINTER's verifier, compare its runs with Theorem 3.3, and write its directory.

    Returns:
        The figures that sum it up, as in its provenance.

    Raises:
        UserError: as `make_head`.
    """
    run = _Job(job, watch)
    (train, sizes), (valid, _), (test, _) = (run.shop.verifier_rows(part) for part in ("train", "valid", "test"))
    head, history = run.train({"train": train, "valid": valid})
    trial = run.shop.trial(job.trial_prompts, job.trial_tokens, part="test")
    found = sprinter.quality(trial, head, run.shop.tokenizer)
    found["predicted"] = sprinter.predict(head, run.shop.draft_rows_above("test"), job.labels)
    found["drift"] = sprinter.drift(head, run.shop.pair, run.shop.placed("test")[: job.trial_prompts])
    found["drift"]["theorem_3_1"] = found["predicted"]["eta_fp"] * found["drift"]["draft_tv"]
    metrics = {
        "test": judge(head, test, train, job.labels),
        "rows_of_each_category": sizes,
        "sprinter": found,
        "history": history,
    }
    return run.write(head, metrics)


class _Job:
    """A job under way: its workshop, its checkpoints, its clock."""

    def __init__(self, job: HeadJob, watch: Watch) -> None:
        self.start = time.perf_counter()
        self.job = job
        self.watch = watch
        self.config(64)  # refuses impossible shapes before models are loaded
        self.shop = PairData(job.material, watch)

    def config(self, width: int) -> HeadConfig:
        """The head's, named for its models without the folders they are in."""
        job = self.job
        draft, target = (_short_name(name) for name in (job.material.draft, job.material.target))
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
        """Says which run a checkpoint belongs to."""
        job = self.job
        facts = (job.kind, job.depth, job.shared_blocks, job.reads_draw, job.mix, job.batch, job.sweep)
        return digest(self.shop.identity, facts, asdict(job.labels))

    def train(self, rows: dict[str, JudgeRows]) -> tuple[Head, list[Record]]:
        """Train a head of the job's shape, from its checkpoint if there is one."""
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
        """The verification rule that the trials run with."""
        return RULES[self.job.kind]

    def costs(self, trial: Trial) -> PassCosts:
        """As given, or as measured once for this run."""
        if self.job.cost_ratio is not None:
            return PassCosts(draft=self.job.cost_ratio, target=1.0)
        few = replace(trial, prompts=trial.prompts[:4])
        return PassCosts(**remembered(self.job.work / "costs.json", lambda: asdict(sweep.measure_costs(few))))

    def fixed(self, trial: Trial) -> list[dict[str, Any]]:
        """The baseline's table."""
        made: list[dict[str, Any]] = remembered(
            self._file("fixed", trial), lambda: sweep.fixed_table(trial, self.rule, watch=self.watch)
        )
        return made

    def _file(self, name: str, trial: Trial) -> Path:
        return self.job.work / f"{name}-{digest(self.identity, trial.prompts, trial.tokens)[:12]}.json"

    def thresholds(self, head: Head, trial: Trial) -> dict[str, Any]:
        """The rates of a head at every threshold, and the one that costs least."""
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
            "heads": sweep.beside_fixed(fixed, table),
        }

    def sweep(self, rows: dict[str, JudgeRows], trial: Trial) -> dict[str, Any]:
        """Every depth and loss weight at every threshold (weights mean nothing to a log_ratio head)."""
        asked, table = self.job, []
        weights = sweep.WEIGHTS if asked.kind == "acceptance" else (asked.labels.w_rej,)
        for weight in weights:
            for depth in sweep.DEPTHS:
                self.job = replace(asked, depth=depth, labels=replace(asked.labels, w_rej=weight))
                table += remembered(self._file("cell", trial), lambda: self._cell(rows, trial))
        self.job = asked
        return self._chosen(trial, table)

    def _cell(self, rows: dict[str, JudgeRows], trial: Trial) -> list[dict[str, Any]]:
        """One head of the sweep: its rates at every threshold, beside its validation KL."""
        job = self.job
        (job.work / "checkpoint.safetensors").unlink(missing_ok=True)
        head, _ = self.train(rows)
        (job.work / "checkpoint.safetensors").unlink(missing_ok=True)
        found = judge(head, rows["valid"], rows["train"], job.labels)
        facts = {"depth": job.depth, "w_rej": job.labels.w_rej, "valid_kl": found.get("kl", found.get("huber"))}
        return [facts | row for row in sweep.head_table(trial, head, self.rule, watch=self.watch)]

    def adopt(self, row: dict[str, Any]) -> HeadJob:
        """Go on with the shape, weight and threshold of a row of the sweep."""
        labels = replace(self.job.labels, w_rej=row["w_rej"])
        self.job = replace(self.job, depth=row["depth"], labels=labels, threshold=row["threshold"])
        return self.job

    # --- the artefact ---------------------------------------------------------------------------------------------

    def write(self, head: Head, metrics: dict[str, Any]) -> dict[str, Any]:
        """Write OUT, drop OUT.work; returns the summary."""
        summary = self._summary(head, metrics)
        job = self.job
        origin = provenance(
            data=self.shop.told,
            seed=job.material.seed,
            metrics=summary,
            seconds=time.perf_counter() - self.start,
            device=self.shop.draft.device,
            models={Path(name).name: print_ for name, print_ in self.shop.prints.items()},
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
        """The figures worth a line."""
        found = {name: metrics["test"][name] for name in _SUMMARY if name in metrics["test"]}
        found["threshold"] = head.config.threshold
        for name in ("sweep", "thresholds"):
            if name in metrics:
                found["chosen"], found["best_fixed"] = metrics[name]["chosen"], metrics[name]["best_fixed"]
        if "sprinter" in metrics:
            found["sprinter"] = metrics["sprinter"]
        return found


def _short_name(name: str) -> str:
    """A model's name without the folders it is in."""
    kind, colon, where = name.rpartition(":")
    return f"{kind}{colon}{Path(where).name}" if Path(where).is_absolute() or kind == "feature_head" else name
