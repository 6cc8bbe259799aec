"""Measures of predicted probabilities (binary KL, calibration, ROC, error rates) with baselines; ROUGE of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.special import xlogy

_EDGE = 1e-6


def kl_rows(label: Float[Tensor, " rows"], predicted: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """KL(Bernoulli(label) || Bernoulli(predicted)) of each row, in nats (SpecDec++, arXiv 2405.19715, appendix C.3)."""
    p, q = label.double(), predicted.double().clamp(_EDGE, 1 - _EDGE)
    rows: Tensor = xlogy(p, p) + xlogy(1 - p, 1 - p) - p * q.log() - (1 - p) * (1 - q).log()
    return rows


def binary_kl(label: Float[Tensor, " rows"], predicted: Float[Tensor, " rows"]) -> float:
    """The mean of `kl_rows`."""
    return float(kl_rows(label, predicted).mean())


def fitted(score: Float[Tensor, " rows"], label: Float[Tensor, " rows"], steps: int = 50) -> tuple[float, float]:
    """Slope and offset of the logistic regression of (soft) labels on one score, by Newton's method."""
    x = torch.stack([score.double(), torch.ones_like(score, dtype=torch.float64)], -1)
    y = label.double()
    w = torch.zeros(2, dtype=torch.float64)
    for _ in range(steps):
        p = (x @ w).sigmoid()
        slope = x.T @ (y - p) / len(y) - 1e-6 * w
        curve = (x * (p * (1 - p)).unsqueeze(-1)).T @ x / len(y) + 1e-6 * torch.eye(2, dtype=torch.float64)
        move = torch.linalg.solve(curve, slope)
        w = w + move / max(1.0, float(move.norm()))
    return float(w[0]), float(w[1])


def odds(prob: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """log(p / (1 - p)), with p limited so that it is finite."""
    return prob.double().clamp(_EDGE, 1 - _EDGE).logit()


def calibration(
    label: Float[Tensor, " rows"], predicted: Float[Tensor, " rows"], bins: int = 10
) -> tuple[float, list[dict[str, Any]]]:
    """Expected calibration error, and the curve: rows, mean prediction and mean label of each non-empty bin."""
    place = (predicted.double() * bins).long().clamp(0, bins - 1)
    curve = []
    for number in range(bins):
        inside = place == number
        if bool(inside.any()):
            mean = float(predicted[inside].double().mean())
            curve.append({"rows": int(inside.sum()), "predicted": mean, "true": float(label[inside].double().mean())})
    total = sum(each["rows"] for each in curve)
    return sum(each["rows"] / total * abs(each["predicted"] - each["true"]) for each in curve), curve


def auc(score: Float[Tensor, " rows"], positive: Bool[Tensor, " rows"]) -> float:
    """Area under the ROC curve by ranks, where ties count one half; NaN where one class is missing."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return float("nan")
    _, place, counts = torch.unique(score.double(), return_inverse=True, return_counts=True)
    ends = counts.cumsum(0)
    ranks = (ends - counts + ends + 1).double() / 2  # mean rank of each distinct score, from 1
    won = float(ranks[place][positive].sum()) - positives * (positives + 1) / 2
    return won / (positives * negatives)


def rates_at(score: Float[Tensor, " rows"], positive: Bool[Tensor, " rows"], threshold: float) -> tuple[float, float]:
    """eta_TP and eta_FP (SPRINTER): the shares of positive and of negative rows whose score exceeds a threshold."""
    above = (score > threshold).double()
    return float(above[positive].mean()), float(above[~positive].mean())


def roc(score: Float[Tensor, " rows"], positive: Bool[Tensor, " rows"], points: int = 21) -> list[dict[str, Any]]:
    """The ROC curve at evenly spaced thresholds from 0 to 1."""
    made = []
    for number in range(points):
        threshold = number / (points - 1)
        true, false = rates_at(score, positive, threshold)
        made.append({"threshold": threshold, "true_positive": true, "false_positive": false})
    return made


def probability_report(
    label: Float[Tensor, " rows"],
    predicted: Float[Tensor, " rows"],
    top: Float[Tensor, " rows"],
    known_label: Float[Tensor, " known"],
    known_top: Float[Tensor, " known"],
) -> dict[str, Any]:
    """Figures of predicted probabilities and of two baselines.

    The baselines are the mean training label, and the largest probability of the draft's distribution (`top`):
    directly, and through a logistic curve that is fitted to the training rows (`known_label`, `known_top`).
    """
    slope, offset = fitted(odds(known_top), known_label)
    through = (slope * odds(top) + offset).sigmoid()
    error, curve = calibration(label, predicted)
    return {
        "rows": len(label),
        "mean_label": float(label.mean()),
        "kl": binary_kl(label, predicted),
        "kl_constant": binary_kl(label, known_label.double().mean().expand(len(label))),
        "kl_max_probability": binary_kl(label, top),
        "kl_max_probability_fitted": binary_kl(label, through),
        "ece": error,
        "calibration": curve,
    }


def rouge_scores(references: Sequence[str], texts: Sequence[str]) -> list[dict[str, float]] | None:
    """ROUGE-1, ROUGE-2 and ROUGE-L F-measures of each text; None without the package rouge-score (extra `bench`)."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        return None
    names = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(list(names))
    found = [scorer.score(reference, text) for reference, text in zip(references, texts, strict=True)]
    return [{name: float(each[name].fmeasure) for name in names} for each in found]
