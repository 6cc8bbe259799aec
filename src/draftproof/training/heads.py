"""Training of heads on rows of features: the loss and the labels of each kind, and its figures on held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import huber_loss, softplus

from draftproof.errors import UserError
from draftproof.heads import Head, HeadConfig
from draftproof.progress import Watch, silent
from draftproof.rng import fold
from draftproof.training.features import JudgeRows
from draftproof.training.loop import Loss, Record, TrainingPlan, train
from draftproof.training.metrics import auc, probability_report, rates_at, roc

RATIO_LIMIT = 5.0  # a ratio beyond e^5 decides alone: the running probability is then below 1%, or 1


@dataclass(frozen=True)
class Labels:
    """Weights and labels of the loss of a head."""

    # weight of acceptances in the cross-entropy; acceptance only (SpecDec++, arXiv 2405.19715, section 3.3)
    w_acc: float = 1.0
    w_rej: float = 6.0  # weight of rejections in the cross-entropy; acceptance only
    # factor lambda: a token is acceptable if q <= lambda p; verifiers only (SPRINTER, arXiv 2502.04557, section 3.2)
    lam: float = 1.2

    def __post_init__(self) -> None:
        if min(self.w_acc, self.w_rej, self.lam) <= 0:
            values = f"{self.w_acc:g}, {self.w_rej:g} and {self.lam:g}"
            raise UserError(f"w_acc, w_rej and lambda: expected numbers above 0, got {values}")

    def acceptable(self, log_ratio: Float[Tensor, " rows"]) -> Tensor:
        """Whether q <= lam p."""
        return log_ratio >= -torch.tensor(self.lam).log()


def weighted_bce(
    output: Float[Tensor, " rows"], label: Float[Tensor, " rows"], w_acc: float = 1.0, w_rej: float = 1.0
) -> Float[Tensor, ""]:
    """Mean of -w_acc P log P^ - w_rej (1 - P) log(1 - P^), P^ = sigmoid(output) (SpecDec++, section 3.3)."""
    return (w_acc * label * softplus(-output) + w_rej * (1 - label) * softplus(output)).mean()


def ratio_loss(output: Float[Tensor, " rows"], log_ratio: Float[Tensor, " rows"]) -> Float[Tensor, ""]:
    """Huber loss on log(p/q), with labels clamped to +-RATIO_LIMIT, so that a token with p = 0 has a finite label."""
    return huber_loss(output, log_ratio.clamp(-RATIO_LIMIT, RATIO_LIMIT))


def head_loss(output: Float[Tensor, " rows"], rows: JudgeRows, kind: str, labels: Labels) -> Float[Tensor, ""]:
    """The loss of a kind of head on its outputs for rows."""
    if kind == "acceptance":
        return weighted_bce(output, rows.accept, labels.w_acc, labels.w_rej)
    if kind == "log_ratio":
        return ratio_loss(output, rows.log_ratio)
    return weighted_bce(output, labels.acceptable(rows.log_ratio).float())


def run_head(head: Head, rows: JudgeRows) -> Float[Tensor, " rows"]:
    """The head's outputs for rows."""
    made: Tensor = head(rows.hidden, rows.log_q if head.config.reads_draw else None)
    return made


def train_head(
    config: HeadConfig,
    rows: JudgeRows,
    valid: JudgeRows,
    plan: TrainingPlan,
    labels: Labels,
    *,
    batch: int = 512,
    checkpoint: Path | None = None,
    identity: str = "",
    watch: Watch = silent,
) -> tuple[Head, list[Record]]:
    """Train a head, and keep the weights with the lowest validation loss (SPRINTER, arXiv 2502.04557, appendix A.5).

    The `batch` rows of a step are drawn by (seed, step). Returns the head and its history; see `loop.train` for the
    rest.
    """
    if not len(rows) or not len(valid):
        raise UserError(f"rows: expected 1 or more to train on and to validate on, got {len(rows)} and {len(valid)}")
    head = fresh_head(config, plan.seed)
    every = max(plan.steps // 20, 1)
    plan = replace(plan, evaluate_every=every, keep_best="valid_loss")

    def loss(module: nn.Module, picked: JudgeRows) -> Loss:
        assert isinstance(module, Head), "heads are trained here"
        return Loss(head_loss(run_head(module, picked), picked, config.kind, labels), len(picked))

    def evaluate(module: nn.Module) -> Record:
        return {"valid_loss": float(loss(module, valid).value)}

    history = train(
        head,
        row_batches(rows, batch, plan.seed),
        loss,
        plan,
        checkpoint=checkpoint,
        identity=identity,
        evaluate=evaluate,
        watch=watch,
    )
    return head, history


def fresh_head(config: HeadConfig, seed: int) -> Head:
    """An untrained head that depends on the seed only."""
    with torch.random.fork_rng():
        torch.manual_seed(fold(seed, 1) >> 1)
        return Head(config)


def row_batches(rows: JudgeRows, size: int, seed: int) -> Callable[[int], JudgeRows]:
    """A function from a step to its batch of rows, drawn with replacement."""

    def batch(step: int) -> JudgeRows:
        generator = torch.Generator().manual_seed(fold(seed, 2, step) >> 1)
        return rows.pick(torch.randint(len(rows), (min(size, len(rows)),), generator=generator))

    return batch


@torch.no_grad()
def evaluate_head(head: Head, rows: JudgeRows, known: JudgeRows, labels: Labels) -> dict[str, Any]:
    """Figures of a head on held-out rows, which depend on its kind; `known` are the training rows, for baselines."""
    head.eval()
    output = run_head(head, rows).double()
    if head.config.kind == "log_ratio":
        return _ratio_figures(output, rows, known)
    if head.config.kind == "acceptance":
        return _acceptance_figures(output, rows, known, labels)
    return _verifier_figures(output.sigmoid(), rows, known, labels, head.config.threshold)


def _acceptance_figures(output: Tensor, rows: JudgeRows, known: JudgeRows, labels: Labels) -> dict[str, Any]:
    """Figures of the predictions, and of the predictions with their odds multiplied by w_rej / w_acc.

    The weighted loss is smallest at odds P w_acc / ((1 - P) w_rej), so the second ones are the predictions of P.
    """
    made = probability_report(rows.accept, output.sigmoid(), rows.top, known.accept, known.top)
    plain = (output + torch.tensor(labels.w_rej / labels.w_acc).log()).sigmoid()
    without = probability_report(rows.accept, plain, rows.top, known.accept, known.top)
    made["auc"] = auc(output, rows.log_ratio >= 0)
    made["auc_max_probability"] = auc(rows.top, rows.log_ratio >= 0)
    return made | {f"{name}_unweighted": without[name] for name in ("kl", "ece", "calibration")}


def _ratio_figures(output: Tensor, rows: JudgeRows, known: JudgeRows) -> dict[str, Any]:
    """Errors of the predicted log(p/q), and of the training median as a baseline."""
    label = rows.log_ratio.double().clamp(-RATIO_LIMIT, RATIO_LIMIT)
    middle = known.log_ratio.double().clamp(-RATIO_LIMIT, RATIO_LIMIT).median().expand(len(rows))
    mean_error = float(((label - label.mean()) ** 2).mean())
    return {
        "rows": len(rows),
        "huber": float(huber_loss(output, label)),
        "huber_constant": float(huber_loss(middle, label)),
        "explained": 1 - float(((output - label) ** 2).mean()) / max(mean_error, 1e-12),
        "auc": auc(output, rows.log_ratio >= 0),
        "auc_max_probability": auc(rows.top, rows.log_ratio >= 0),
    }


def _verifier_figures(score: Tensor, rows: JudgeRows, known: JudgeRows, labels: Labels, tau: float) -> dict[str, Any]:
    good = labels.acceptable(rows.log_ratio)
    made = probability_report(good.float(), score, rows.top, labels.acceptable(known.log_ratio).float(), known.top)
    true, false = rates_at(score, good, tau)
    return made | {
        "auc": auc(score, good),
        "auc_max_probability": auc(rows.top, good),
        "tau": tau,
        "lambda": labels.lam,
        "eta_tp": true,
        "eta_fp": false,
        "roc": roc(score, good),
    }
