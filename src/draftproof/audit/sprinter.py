"""SPRINTER (arXiv 2502.04557) with trained verifiers, enumerated on toy pairs and compared with its Theorem 3.1.

The theorem says that a position has the distribution (1 - eta) p + eta q, where eta is the rate at which the verifier
accepts unacceptable tokens. The decisions of a trained verifier depend on the context. So three comparisons are made:
- the enumerated distribution after every context with the one that follows from the verifier's decisions there; both
  must be equal up to rounding;
- its total variation from the target with eta TV(p, q), where eta is the accepted share of the excess (q - p)+; both
  must be equal up to rounding;
- the mean of this total variation with eta_FP times the mean TV, with one rate for all contexts: this is how the
  theorem is used for predictions, and it is an approximation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.engine import Engine
from draftproof.engine.loop import RoundRngFactory
from draftproof.heads import Head, HeadConfig
from draftproof.sampling import SamplingParams
from draftproof.stoppers.trained import Approximate
from draftproof.testing import TableModel, engine_distribution
from draftproof.theory.sprinter import drift
from draftproof.training.features import JudgeRows, ModelPair, drafted, join
from draftproof.training.heads import Labels, train_head
from draftproof.training.loop import TrainingPlan
from draftproof.training.responses import Response
from draftproof.training.sprinter import accepted_at, position_distribution
from draftproof.verifiers.chain import last_token_verifier

VOCAB, WIDTH, ORDER = 3, 6, 2
TAU = 0.35  # a low threshold: the verifier accepts bad tokens in some contexts and rejects good ones in others
EXACT = 1e-12
PARAMS = SamplingParams(max_tokens=3)  # a drafted token, one after it, and a bonus token


@dataclass(frozen=True)
class SprinterLine:
    """Figures of one verifier on one pair."""

    pair: str
    verifier: str
    contexts: int  # number of them that were enumerated
    passed: float  # share of the draft's mass that the verifier accepts, mean over contexts
    distance: float  # largest total variation between the enumerated distribution and that of the verifier's decisions
    excess: float  # largest difference of the enumerated drift and eta TV(p, q), eta the accepted share of the excess
    drift: float  # enumerated total variation from the target, mean over contexts
    eta_fp: float  # accepted share of the unacceptable mass, over all contexts
    predicted: float  # eta_fp times the mean of TV(p, q)

    @property
    def exact(self) -> bool:
        """Whether both exact comparisons agree."""
        return max(self.distance, self.excess) < EXACT

    def to_dict(self) -> dict[str, Any]:
        """The line as values for JSON."""
        return {**asdict(self), "exact": self.exact}


def audit_sprinter(seeds: int = 4) -> Iterator[SprinterLine]:
    """Train two verifiers on each of several pairs, and enumerate their output distributions."""
    for seed in range(seeds):
        draft = TableModel(VOCAB, 1000 + seed, order=ORDER, hidden=WIDTH)
        pair = ModelPair(TableModel(VOCAB, seed, order=ORDER), draft, SamplingParams())
        for depth, reads_draw in ((0, False), (2, True)):
            head = trained(pair, depth=depth, reads_draw=reads_draw, seed=seed)
            name = f"{depth} blocks, {'state and log q' if reads_draw else 'state only'}"
            yield examine(f"tables {seed}", name, pair, head)


def trained(pair: ModelPair, *, depth: int, reads_draw: bool, seed: int) -> Head:
    """A verifier trained on texts of the pair's draft model, with lambda = 1 as in Theorem 3.1."""
    shape: dict[str, Any] = {"depth": depth, "reads_draw": reads_draw, "threshold": TAU}
    config = HeadConfig("verifier", WIDTH, pair.draft.name, pair.target.name, **shape)
    known, held = _rows(pair, seed, range(96)), _rows(pair, seed, range(96, 128))
    plan = TrainingPlan(steps=400, learning_rate=2e-2, warmup=10, seed=seed, log_every=100)
    head, _ = train_head(config, known, held, plan, Labels(lam=1.0), batch=256)
    return head.eval()


def _rows(pair: ModelPair, seed: int, numbers: range) -> JudgeRows:
    params = [SamplingParams(max_tokens=12, seed=1000 * seed + number) for number in numbers]
    prompts = [[number % VOCAB] for number in numbers]
    outputs = Engine(pair.draft).generate(prompts, params)
    responses = [Response(tuple(prompt), out.token_ids) for prompt, out in zip(prompts, outputs, strict=True)]
    return join(drafted(pair, above=True)(responses, 0))


def examine(name: str, verifier: str, pair: ModelPair, head: Head) -> SprinterLine:
    """Enumerate the distribution of the first token after every context, and compare it with the theorem."""
    contexts = list(itertools.product(range(VOCAB), repeat=ORDER))
    p, q, passed = (torch.stack(parts) for parts in zip(*(_at(pair, head, c) for c in contexts), strict=True))
    found = torch.stack([first_token_distribution(pair, head, context) for context in contexts])
    own = position_distribution(p, q, passed)
    over = (q - p).clamp(min=0)
    far = (found - p).abs().sum(-1) / 2
    eta = (over * passed).sum(-1) / over.sum(-1)
    bad = q * (q > p)
    eta_fp = float((bad * passed).sum() / bad.sum())
    return SprinterLine(
        pair=name,
        verifier=verifier,
        contexts=len(contexts),
        passed=float((q * passed).sum(-1).mean()),
        distance=float(((found - own).abs().sum(-1) / 2).amax()),
        excess=float((far - eta * over.sum(-1)).abs().amax()),
        drift=float(far.mean()),
        eta_fp=eta_fp,
        predicted=drift(eta_fp, float(over.sum(-1).mean())),
    )


def _at(pair: ModelPair, head: Head, context: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and whether the verifier accepts each token, after a context."""
    p, q = (model.logits(context).softmax(-1) for model in (pair.target, pair.draft) if isinstance(model, TableModel))
    ((_, states),) = pair.q([Response(context, (0,))])
    passed = accepted_at(head, q.unsqueeze(0).float(), states[:1])
    return p, q, passed.expand(1, VOCAB)[0]


def first_token_distribution(pair: ModelPair, head: Head, context: tuple[int, ...]) -> Float[Tensor, " vocab"]:
    """The distribution of the first token after a context, by enumerating every outcome of the engine."""

    def make(round_rng: RoundRngFactory) -> Engine:
        drafter = ModelDrafter(DraftModel(pair.draft, vocab_size=VOCAB), Approximate(head))
        return Engine(pair.target, drafter, last_token_verifier(), round_rng=round_rng)

    found = torch.zeros(VOCAB, dtype=torch.float64)
    for tokens, weight in engine_distribution(make, context, PARAMS).items():
        found[tokens[0]] += weight
    return found
