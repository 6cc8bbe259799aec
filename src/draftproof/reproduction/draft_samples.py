"""Long drafts at many places, with what a trained head reads of them: every stopper is tried on the same drafts.

A stopper that cuts a chain of `LIMIT` tokens after L of them gives a round of L drafted tokens, of which token
verification accepts the sum over i <= L of prod min(1, p/q) in expectation. So rates of all lengths
and thresholds come from one set of drafts, with common random numbers; whole runs would need one run for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.heads import Head
from draftproof.provenance import digest
from draftproof.reproduction.experiments import OPENINGS, Experiments, Names
from draftproof.rng import fold
from draftproof.sampling import SamplingParams
from draftproof.stoppers.base import StopperBase
from draftproof.stoppers.trained import LIMIT
from draftproof.training.features import JudgeRows, ModelPair, collect, drafted
from draftproof.training.heads import run_head
from draftproof.training.responses import Response

STRIDE = 4  # tokens from one place to the next


@dataclass(frozen=True)
class Field:
    """Where drafts are made.

    Attributes:
        names: the models.
        dataset: OPENINGS or a data set that ships.
        prompts, places: how many, places for each prompt.
        seed: of the target's texts and the drafts.
        top_k: of the sampling, at temperature 1.
    """

    names: Names
    dataset: str = OPENINGS
    prompts: int = 16
    places: int = 12
    seed: int = 0
    top_k: int = 0


@dataclass(frozen=True)
class Harvest:
    """Drafts of LIMIT tokens: as many for each prompt as there are places, prompt after prompt.

    Attributes:
        at: rows with the state at each token: what acceptance heads read.
        above: rows with the state before each token: what verifiers read.
        prompts: how many there are.
    """

    at: JudgeRows
    above: JudgeRows
    prompts: int

    @property
    def chance(self) -> Float[Tensor, "drafts LIMIT"]:
        """Pr(the first i tokens are accepted) by token verification."""
        return self.at.accept.double().reshape(-1, LIMIT).cumprod(-1)

    def by_prompt(self, values: Float[Tensor, " drafts"]) -> Float[Tensor, " prompts"]:
        """Sums over the drafts of each prompt."""
        return values.double().reshape(self.prompts, -1).sum(-1)

    def group(self) -> Tensor:
        """The prompt of each row."""
        return torch.arange(len(self.at)) // (len(self.at) // self.prompts)


def gather(lab: Experiments, field: Field) -> Harvest:
    """The drafts of a field, from the records where they are there."""
    names = field.names
    pair = pair_of(lab, names, field.top_k)
    texts = lab.remembered("drafts", field, lambda: _drafts(lab, field))
    rows = [Response(tuple(prompt), tuple(tokens)) for prompt, tokens in texts]
    folder = lab.folder / "features" / digest([names.label, names.dtype, field.top_k], texts)[:16]
    return Harvest(
        at=collect(drafted(pair), rows, folder / "at"),
        above=collect(drafted(pair, above=True), rows, folder / "above"),
        prompts=field.prompts,
    )


def pair_of(lab: Experiments, names: Names, top_k: int = 0) -> ModelPair:
    """Both models and how they are sampled."""
    params = SamplingParams(top_k=top_k)
    return ModelPair(lab.backend(names.target, names.dtype), lab.backend(names.draft, names.dtype), params)


def _drafts(lab: Experiments, field: Field) -> list[tuple[list[int], list[int]]]:
    """Prefixes at places of the target's texts, and what the draft model makes of them."""
    names = field.names
    prompts = lab.prompts(names.target, field.prompts, field.dataset)
    texts = _sample(lab, names.target, field, prompts, field.places * STRIDE, 0)
    prefixes = [
        [*prompt, *text[: place * STRIDE]]
        for prompt, text in zip(prompts, texts, strict=True)
        for place in range(field.places)
    ]
    return list(zip(prefixes, _sample(lab, names.draft, field, prefixes, LIMIT, 1), strict=True))


def _sample(
    lab: Experiments, name: str, field: Field, prompts: Sequence[Sequence[int]], tokens: int, part: int
) -> list[list[int]]:
    """Plain samples of a model, each with a seed of its own."""
    engine = Engine(lab.backend(name, field.names.dtype), max_batch=16)
    base = SamplingParams(top_k=field.top_k, max_tokens=tokens, ignore_eos=True)
    each = [replace(base, seed=fold(field.seed, part, number) >> 1) for number in range(len(prompts))]
    return [list(out.token_ids) for out in engine.generate([list(prompt) for prompt in prompts], each)]


# --- stoppers on the drafts -------------------------------------------------------------------------------------------


def fixed_lengths(harvest: Harvest, length: int) -> Tensor:
    """A constant length for every draft."""
    return torch.full((len(harvest.at) // LIMIT,), length)


@torch.no_grad()
def stopped_lengths(harvest: Harvest, head: Head, stopper: StopperBase) -> Tensor:
    """Where a stopper with a head that reads the state at a token would end each draft.

    The newest token is not judged yet when the stopper is asked, and the first signal is about the root, which it
    leaves out (see stoppers.trained).
    """
    output = run_head(head, harvest.at).double().reshape(-1, LIMIT)
    signals = torch.nn.functional.logsigmoid(output) if head.config.kind == "acceptance" else output
    lengths = []
    for row in signals.tolist():
        asked = [0.0, *row[:-1]]
        ends = (count for count in range(1, LIMIT) if stopper.stop_after(asked[:count], 0))
        lengths.append(next(ends, LIMIT))
    return torch.tensor(lengths)


def round_sums(harvest: Harvest, lengths: Sequence[Tensor]) -> Float[Tensor, "prompts columns"]:
    """For each prompt: rounds, then for each set of lengths the tokens drafted and (expected) accepted."""
    chance = harvest.chance
    columns = [torch.ones(len(chance), dtype=torch.float64)]
    for own in lengths:
        columns.append(own.double())
        columns.append((chance.cumsum(-1)).gather(-1, own.unsqueeze(-1) - 1).squeeze(-1))
    return torch.stack([harvest.by_prompt(column) for column in columns], -1)
