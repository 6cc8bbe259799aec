"""Effects of SPRINTER's small verifier (arXiv 2502.04557): tokens per target call, drift from the target, quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from draftproof.engine.request import Output
from draftproof.heads import Head
from draftproof.stoppers.trained import LIMIT, Approximate
from draftproof.training.features import JudgeRows, ModelPair
from draftproof.training.heads import Labels, run_head
from draftproof.training.metrics import rates_at, rouge_scores
from draftproof.training.responses import Response
from draftproof.training.sweep import Trial, rates


def expected_drafted(run: int, true_positive: float, false_positive: float, limit: int = LIMIT) -> float:
    """Mean length of a draft that ends at the first rejection by the verifier, or at `limit` tokens.

    It is 1 + sum over k < limit of Pr(the first k tokens are accepted). As the limit grows, this becomes E[N] + 1 of
    SPRINTER, arXiv 2502.04557, Theorem 3.3. After `run` acceptable tokens, all later ones count as unacceptable.
    """
    return 1 + math.fsum(true_positive ** min(k, run) * false_positive ** max(k - run, 0) for k in range(1, limit))


def runs(good: Bool[Tensor, " rows"], rows: JudgeRows, limit: int = LIMIT) -> list[int]:
    """Number of tokens before the first unacceptable one, for each drafted sequence of at least `limit` tokens."""
    found = []
    for number in torch.unique(rows.group).tolist():
        mine = good[rows.group == number]
        if len(mine) >= limit:
            bad = (~mine).nonzero()
            found.append(int(bad[0]) if len(bad) else len(mine))
    return found


@torch.no_grad()
def predict(head: Head, rows: JudgeRows, labels: Labels) -> dict[str, float]:
    """Expected tokens per target call (SPRINTER, Theorem 3.3), from the error rates and runs on drafted sequences."""
    score = run_head(head, rows).double().sigmoid()
    good = labels.acceptable(rows.log_ratio)
    tau = head.config.threshold
    true, false = rates_at(score, good, tau)
    lengths = runs(good, rows) or [0]
    drafted = math.fsum(expected_drafted(length, true, false) for length in lengths) / len(lengths)
    rejected = score <= tau
    kept = float(rows.accept[rejected].double().mean()) if bool(rejected.any()) else 1.0
    return {
        "eta_tp": true,
        "eta_fp": false,
        "mean_run": sum(lengths) / len(lengths),
        "drafted_per_call": drafted,
        "block_efficiency": drafted + kept,  # a rejected token that the target keeps is followed by a bonus token
    }


def position_distribution(
    p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"], accepted: Bool[Tensor, " rows #vocab"]
) -> Float[Tensor, "rows vocab"]:
    """The output distribution of a drafted position: y ~ q is kept if the verifier accepts it, else token-verified."""
    rejected = (~accepted).to(q.dtype)
    shared = torch.minimum(p, q)
    lost = (rejected * (q - shared)).sum(-1, keepdim=True)
    residual = (p - q).clamp(min=0)
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-30)
    return q * (1 - rejected) + rejected * shared + lost * residual


@torch.no_grad()
def drift(head: Head, pair: ModelPair, responses: Sequence[Response]) -> dict[str, float]:
    """Total variation from the target at the positions of given texts, computed over the whole vocabulary.

    Means over all positions: "position_tv" of SPRINTER's output distribution, "draft_tv" of q.
    """
    found: list[Tensor] = []
    for start in range(0, len(responses), 8):
        batch = list(responses[start : start + 8])
        for p, (q, hidden) in zip(pair.p(batch), pair.q(batch), strict=True):
            output = position_distribution(p, q, accepted_at(head, q, hidden))
            found.append(torch.stack([(output - p).abs().sum(-1), (q - p).abs().sum(-1)]) / 2)
    both = torch.cat(found, -1).double().mean(-1)
    return {"position_tv": float(both[0]), "draft_tv": float(both[1])}


def accepted_at(head: Head, q: Float[Tensor, "rows vocab"], hidden: Float[Tensor, "rows dim"]) -> Tensor:
    """Whether the verifier accepts each token at each position, [rows, vocab]; without `reads_draw`, [rows, 1]."""
    if not head.config.reads_draw:
        every: Tensor = head(hidden).sigmoid() > head.config.threshold
        return every.unsqueeze(-1)
    wide = hidden.unsqueeze(1).expand(-1, q.shape[-1], -1)
    made: Tensor = head(wide, q.clamp(min=1e-30).log()).sigmoid() > head.config.threshold
    return made


def log_likelihood(pair: ModelPair, outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> float:
    """Mean log-probability per token of outputs, under the target's own distribution."""
    rows = [Response(tuple(prompt), out.token_ids) for prompt, out in zip(prompts, outputs, strict=True)]
    rows = [row for row in rows if row.tokens]
    return math.fsum(pair.log_likelihoods(rows)) / max(sum(len(row.tokens) for row in rows), 1)


def quality(trial: Trial, head: Head, tokenizer: Any) -> dict[str, Any]:
    """Rates, log-likelihood and ROUGE (against a second lossless sample) of SPRINTER's and of lossless responses."""
    lossy = trial.run(Approximate(head), "last_token")
    plain, second = (trial.run(Approximate(head), "block", shift=shift) for shift in (0, 1))
    made: dict[str, Any] = {"measured": rates(lossy), "lossless": rates(plain)}
    for name, outputs in (("measured", lossy), ("lossless", plain)):
        made[name]["log_likelihood"] = log_likelihood(trial.pair, outputs, trial.prompts)
        made[name]["rouge"] = rouge(outputs, second, tokenizer)
    return made


def rouge(outputs: Sequence[Output], references: Sequence[Output], tokenizer: Any) -> dict[str, float] | None:
    """Means of `rouge_scores` over all outputs; None without the package rouge-score (extra `bench`)."""
    found = rouge_scores(
        *([tokenizer.decode(out.token_ids, skip_special_tokens=True) for out in each] for each in (references, outputs))
    )
    return None if found is None else {name: sum(each[name] for each in found) / len(found) for name in found[0]}
