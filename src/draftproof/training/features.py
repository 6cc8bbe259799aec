"""The rows that heads are trained on: the draft model's states and both models' probabilities, kept on disk.

Each model reads a prompt and the tokens after it in one forward pass. The tokens y of the rows come from q in one of
three ways:
- mixed: y_i ~ q(.|x, X_<i) together with a response X of the target. The state is the one at y_i after (x, Z_<i),
  where Z has a share of its tokens from X and the others from y. Only places where Z has the token of y are rows
  (SpecDec++, arXiv 2405.19715, section 3.3).
- drafted: y is the draft model's own continuation of a prefix, so states, labels and prefixes are those of a run.
- before: y_i ~ q(.|S_<i) at every place of any tokens S. The state is the one before y_i, which y_i was drawn from
  (SPRINTER, arXiv 2502.04557, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path

import torch
from jaxtyping import Float, Float16, Int
from torch import Tensor

from draftproof.backends.base import Backend, outputs_along
from draftproof.drafters.draft_model import DraftModel, fit_width
from draftproof.progress import Watch, silent
from draftproof.rng import TorchRng, fold
from draftproof.sampling import SamplingParams, Transforms, check_logits, probabilities
from draftproof.training.responses import Response
from draftproof.training.shards import SHARD, shard

BATCH = 8  # number of sequences in a forward pass
_LEAST = 1e-30


@dataclass(frozen=True, eq=False)
class JudgeRows:
    """Rows of one token each, with the state that a head reads and the label."""

    hidden: Float16[Tensor, "rows dim"]  # the hidden state that the head reads
    log_ratio: Float[Tensor, " rows"]  # log(p/q) of the token
    log_q: Float[Tensor, " rows"]  # log q of the token
    top: Float[Tensor, " rows"]  # the largest probability of q
    group: Int[Tensor, " rows"]  # number of the token's sequence
    place: Int[Tensor, " rows"]  # position of the token after the prompt, from 0

    def __len__(self) -> int:
        return int(self.log_ratio.shape[0])

    @property
    def accept(self) -> Float[Tensor, " rows"]:
        """Acceptance probability of the token in token verification: min(1, p/q)."""
        return self.log_ratio.clamp(max=0).exp()

    def pick(self, index: Tensor) -> JudgeRows:
        """The rows with these numbers."""
        return JudgeRows(**{field.name: getattr(self, field.name)[index] for field in fields(JudgeRows)})


def join(parts: Sequence[JudgeRows]) -> JudgeRows:
    """The rows of all parts, one part after another."""
    return JudgeRows(
        **{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(JudgeRows)}
    )


@dataclass(frozen=True)
class ModelPair:
    """A target and a draft model, with the sampling parameters of both."""

    target: Backend  # the models
    draft: Backend
    params: SamplingParams  # of p and q: temperature, top_k, top_p, min_p; those that depend on the path are not used
    drafting: Callable[[], DraftModel] | None = None  # makes the draft model as drafters use it; None: of `draft`

    def model(self) -> DraftModel:
        """A new draft model as drafters use it, for one engine."""
        return self.drafting() if self.drafting else DraftModel(self.draft, vocab_size=self.target.vocab_size)

    @cached_property
    def transforms(self) -> Transforms:
        """The sampling parameters for the target's vocabulary."""
        return self.params.bind(vocab_size=self.target.vocab_size)

    def p(self, rows: Sequence[Response]) -> list[Float[Tensor, "tokens vocab"]]:
        """The target's distribution before each token of each response, and after the last token."""
        return [probs for probs, _ in self._read(self.target, rows, hidden=False)]

    def log_likelihoods(self, rows: Sequence[Response]) -> list[float]:
        """The sum of the log-probabilities of each response's tokens under the target."""
        found = []
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            for row, p in zip(batch, self.p(batch), strict=True):
                chosen = p[:-1].gather(-1, torch.tensor(row.tokens, dtype=torch.int64).unsqueeze(-1))
                found.append(float(chosen.double().clamp(min=_LEAST).log().sum()))
        return found

    def q(self, rows: Sequence[Response]) -> list[tuple[Float[Tensor, "tokens vocab"], Float[Tensor, "tokens dim"]]]:
        """The draft's distribution and last hidden state before each token of each response, and after the last one."""
        return self._read(self.draft, rows, hidden=True)

    def _read(
        self, model: Backend, rows: Sequence[Response], *, hidden: bool
    ) -> list[tuple[Float[Tensor, "tokens vocab"], Float[Tensor, "tokens dim"]]]:
        read = []
        for output in outputs_along(model, [row.prompt for row in rows], [row.tokens for row in rows], hidden=hidden):
            logits = fit_width(output.logits, self.target.vocab_size, output.ids)
            check_logits(logits, model.name)
            state = logits if output.hidden is None else output.hidden
            read.append((probabilities(logits, self.transforms).cpu(), state.float().cpu()))
        return read


def fit(responses: Sequence[Response], *models: Backend) -> list[Response]:
    """The responses cut to the contexts of the models; responses without any token left are dropped."""
    bounds = [model.max_positions for model in models if model.max_positions is not None]
    most = min(bounds, default=None)
    cut = [
        Response(row.prompt, row.tokens[: None if most is None else max(most - len(row.prompt), 0)])
        for row in responses
    ]
    return [row for row in cut if row.tokens]


Build = Callable[[Sequence[Response], int], list[JudgeRows]]  # responses, number of the first


def mixed(pair: ModelPair, mix: float, seed: int) -> Build:
    """Rows of kind mixed: `mix` is the share r of tokens that Z takes from the target's response (SpecDec++, 3.3)."""

    def build(responses: Sequence[Response], first: int) -> list[JudgeRows]:
        p, q = pair.p(responses), [probs for probs, _ in pair.q(responses)]
        drawn, taken = [], []
        for number, (row, probs) in enumerate(zip(responses, q, strict=True), first):
            rng = TorchRng(fold(seed, number))
            drawn.append(rng.categorical(probs[:-1]))
            taken.append(rng.bernoulli(torch.full((len(row.tokens),), mix)))
        z = [
            Response(row.prompt, tuple(torch.where(keep, torch.tensor(row.tokens), y).tolist()))
            for row, keep, y in zip(responses, taken, drawn, strict=True)
        ]
        states = [hidden[1:] for _, hidden in pair.q(z)]
        return [
            _rows(p[i][:-1], q[i][:-1], drawn[i], states[i], first + i).pick(~taken[i]) for i in range(len(responses))
        ]

    return build


def drafted(pair: ModelPair, *, above: bool = False) -> Build:
    """Rows of kind drafted; `above` takes the state before each token, as a verifier does, not the one at the token."""

    def build(responses: Sequence[Response], first: int) -> list[JudgeRows]:
        p, q = pair.p(responses), pair.q(responses)
        return [
            _rows(p[i][:-1], q[i][0][:-1], torch.tensor(row.tokens), q[i][1][:-1] if above else q[i][1][1:], first + i)
            for i, row in enumerate(responses)
        ]

    return build


def before(pair: ModelPair, seed: int) -> Build:
    """Rows of kind before: a new token is drawn from q at every place of the responses."""

    def build(responses: Sequence[Response], first: int) -> list[JudgeRows]:
        p, q = pair.p(responses), pair.q(responses)
        made = []
        for i in range(len(responses)):
            probs = q[i][0][:-1]
            y = TorchRng(fold(seed, first + i)).categorical(probs)
            made.append(_rows(p[i][:-1], probs, y, q[i][1][:-1], first + i))
        return made

    return build


def _rows(
    p: Float[Tensor, "tokens vocab"],
    q: Float[Tensor, "tokens vocab"],
    y: Int[Tensor, " tokens"],
    hidden: Float[Tensor, "tokens dim"],
    group: int,
) -> JudgeRows:
    """Rows of the drawn tokens, where y_i was drawn from q_i."""
    log_p, log_q = (probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).clamp(min=_LEAST).log() for probs in (p, q))
    places = torch.arange(len(y), dtype=torch.int32)
    return JudgeRows(
        hidden=hidden.half(),
        log_ratio=(log_p - log_q).float(),
        log_q=log_q.float(),
        top=q.amax(-1).float(),
        group=torch.full_like(places, group),
        place=places,
    )


def collect(
    build: Build, responses: Sequence[Response], folder: Path, *, watch: Watch = silent, title: str = "reading features"
) -> JudgeRows:
    """The rows of all responses, from shards on disk where they exist.

    The name of `folder` must be a hash of everything the rows depend on.
    """
    starts = range(0, len(responses), SHARD)
    parts = []
    with watch(title, len(starts), 0) as tick:
        for number, start in enumerate(starts):
            some = responses[start : start + SHARD]
            found, fresh = shard(folder / f"{number:05d}.safetensors", partial(_tensors, build, some, start))
            parts.append(JudgeRows(**found))
            tick(number + 1, tokens=len(parts[-1]) if fresh else 0)
    return join(parts)


def _tensors(build: Build, responses: Sequence[Response], first: int) -> dict[str, Tensor]:
    starts = range(0, len(responses), BATCH)
    return vars(join([rows for start in starts for rows in build(responses[start : start + BATCH], first + start)]))
