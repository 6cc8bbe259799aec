"""Samples of long drafts at many positions, with the inputs of trained heads, to compare stoppers on the same drafts.

A stopper that cuts a chain of `LIMIT` tokens after L of them gives a round of L drafted tokens. The expected number
that token verification accepts is the sum over i <= L of prod min(1, p/q). So the rates of all lengths and thresholds
come from one set of drafts, with common random numbers; whole runs would need one run for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.heads import Head, HeadConfig
from draftproof.provenance import digest
from draftproof.reproduction.experiments import OPENINGS, SMALL, Experiments, PairNames
from draftproof.rng import fold
from draftproof.sampling import SamplingParams
from draftproof.stoppers.base import StopperBase
from draftproof.stoppers.trained import LIMIT
from draftproof.training.features import JudgeRows, ModelPair, collect, drafted
from draftproof.training.heads import Labels, run_head, train_head
from draftproof.training.loop import TrainingPlan
from draftproof.training.responses import Response

STRIDE = 4  # tokens from one position to the next
STEPS = 400  # of the training of heads


@dataclass(frozen=True)
class SamplePlan:
    """The positions where drafts are sampled, at temperature 1.

    `places` is the number of positions in the target's continuation of each prompt. The seed is that of continuations
    and drafts.
    """

    pair: PairNames
    dataset: str = OPENINGS
    prompts: int = 16
    places: int = 12
    seed: int = 0
    top_k: int = 0


@dataclass(frozen=True)
class DraftSamples:
    """Drafts of LIMIT tokens, one for each position of each prompt, in the order of the prompts."""

    at_token: JudgeRows  # a row a drafted token, with the draft model's state at it, for acceptance heads
    before_token: JudgeRows  # the same with the state before the token, for verifiers
    prompts: int  # number of them

    @property
    def prefix_acceptance(self) -> Float[Tensor, "drafts LIMIT"]:
        """Pr(the first i tokens are accepted) by token verification."""
        return self.at_token.accept.double().reshape(-1, LIMIT).cumprod(-1)

    def by_prompt(self, values: Float[Tensor, " drafts"]) -> Float[Tensor, " prompts"]:
        """Sums over the drafts of each prompt."""
        return values.double().reshape(self.prompts, -1).sum(-1)


def sample_drafts(experiments: Experiments, plan: SamplePlan) -> DraftSamples:
    """The drafts of a plan, from the cached records if they exist."""
    pair = model_pair(experiments, plan.pair, plan.top_k)
    texts = experiments.cached("drafts", plan, lambda: _drafts(experiments, plan))
    rows = [Response(tuple(prompt), tuple(tokens)) for prompt, tokens in texts]
    key = digest([plan.pair.label, plan.pair.dtype, plan.top_k], texts)[:16]
    folder = experiments.folder / "features" / key
    return DraftSamples(
        at_token=collect(drafted(pair), rows, folder / "at"),
        before_token=collect(drafted(pair, above=True), rows, folder / "above"),
        prompts=plan.prompts,
    )


def profile_samples(
    experiments: Experiments, dataset: str, seed: int = 0, *, most: int = 16, top_k: int = 0
) -> DraftSamples:
    """Drafts of the small pair at the profile's size, after at most so many prompts; most data sets have 16."""
    profile = experiments.profile
    prompts = min(profile.prompts, most)
    return sample_drafts(experiments, SamplePlan(SMALL, dataset, prompts, profile.places, seed, top_k))


def trained_head(kind: str, known: JudgeRows, valid: JudgeRows, labels: Labels, depth: int = 0) -> Head:
    """A head for the small pair, trained in a few steps."""
    config = HeadConfig(kind, known.hidden.shape[-1], SMALL.draft, SMALL.target, depth=depth)
    plan = TrainingPlan(steps=STEPS, learning_rate=3e-3, warmup=20)
    return train_head(config, known, valid, plan, labels)[0]


def model_pair(experiments: Experiments, pair: PairNames, top_k: int = 0) -> ModelPair:
    """Both models, loaded, and their sampling."""
    target, draft = (experiments.backend(name, pair.dtype) for name in (pair.target, pair.draft))
    return ModelPair(target, draft, SamplingParams(top_k=top_k))


def _drafts(experiments: Experiments, plan: SamplePlan) -> list[tuple[list[int], list[int]]]:
    """Prefixes that end at the positions of the target's continuations, and the draft model's continuations of them."""
    prompts = experiments.prompts(plan.pair.target, plan.prompts, plan.dataset)
    texts = _sample(experiments, plan.pair.target, plan, prompts, plan.places * STRIDE, 0)
    prefixes = [
        [*prompt, *text[: place * STRIDE]]
        for prompt, text in zip(prompts, texts, strict=True)
        for place in range(plan.places)
    ]
    return list(zip(prefixes, _sample(experiments, plan.pair.draft, plan, prefixes, LIMIT, 1), strict=True))


def _sample(
    experiments: Experiments, name: str, plan: SamplePlan, prompts: Sequence[Sequence[int]], tokens: int, part: int
) -> list[list[int]]:
    """Plain samples of a model; every prompt has its own seed."""
    engine = Engine(experiments.backend(name, plan.pair.dtype), max_batch=16)
    base = SamplingParams(top_k=plan.top_k, max_tokens=tokens, ignore_eos=True)
    each = [replace(base, seed=fold(plan.seed, part, number) >> 1) for number in range(len(prompts))]
    return [list(out.token_ids) for out in engine.generate([list(prompt) for prompt in prompts], each)]


# --- stoppers on the drafts -------------------------------------------------------------------------------------------


def fixed_lengths(samples: DraftSamples, length: int) -> Tensor:
    """A constant length for every draft."""
    return torch.full((len(samples.at_token) // LIMIT,), length)


@torch.no_grad()
def stopped_lengths(samples: DraftSamples, head: Head, stopper: StopperBase) -> Tensor:
    """The length of each draft when a stopper ends it, for stoppers with a head that reads the state at a token.

    When the stopper decides, the newest token has no signal yet; the first signal is about the root and is not used
    (see stoppers.trained).
    """
    output = run_head(head, samples.at_token).double().reshape(-1, LIMIT)
    signals = torch.nn.functional.logsigmoid(output) if head.config.kind == "acceptance" else output
    lengths = []
    for row in signals.tolist():
        shifted = [0.0, *row[:-1]]
        ends = (count for count in range(1, LIMIT) if stopper.stop_after(shifted[:count], 0))
        lengths.append(next(ends, LIMIT))
    return torch.tensor(lengths)


def round_sums(samples: DraftSamples, lengths: Sequence[Tensor]) -> Float[Tensor, "prompts columns"]:
    """For each prompt: rounds, then for each set of lengths the drafted and the expected accepted tokens."""
    accepted = samples.prefix_acceptance.cumsum(-1)
    columns = [torch.ones(len(accepted), dtype=torch.float64)]
    for own in lengths:
        columns.append(own.double())
        columns.append(accepted.gather(-1, own.unsqueeze(-1) - 1).squeeze(-1))
    return torch.stack([samples.by_prompt(column) for column in columns], -1)
