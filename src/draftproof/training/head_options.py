"""Options of `train head`: the models and data, the head, and where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftproof.errors import UserError, refuse_below_one, refuse_outside
from draftproof.files import refuse_existing
from draftproof.sampling import SamplingParams
from draftproof.training.heads import Labels
from draftproof.training.loop import TrainingPlan


@dataclass(frozen=True)
class Material:
    """The models and the data that a head is trained on.

    Attributes:
        target: the target: registered name, hub id, directory or .gguf file.
        draft: the draft model whose hidden states the head reads, or feature_head:DIR.
        data: prompts or texts: .txt or .jsonl, also .gz and .xz; can be repeated.
        form: how texts are separated in .txt files: lines, paragraphs, stories or documents.
        opening: number of sentences of a text that are its prompt, 0 for all; by default 1 in .txt and 0 in .jsonl.
        prompts: number of texts to use; by default all.
        params: temperature, top_k, top_p and max_tokens of the responses.
        starts: number of places in each response from which the draft model continues.
        seed: seed of all random choices.
        dtype: dtype of both models: auto, float32, bfloat16 or float16.
        device: device to use: cpu, cuda or cuda:1; by default an accelerator if there is one.
        cache: directory that keeps responses and features for other runs; by default one next to the pulled models.
    """

    target: str
    draft: str
    data: tuple[Path, ...]
    form: str = "lines"
    opening: int | None = None
    prompts: int | None = None
    params: SamplingParams = SamplingParams(max_tokens=128)  # noqa: RUF009 - frozen
    starts: int = 4
    seed: int = 0
    dtype: str = "auto"
    device: str | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        given = {"prompts": self.prompts, "max_tokens": self.params.max_tokens}
        refuse_below_one(starts=self.starts, **{name: number for name, number in given.items() if number is not None})
        if self.opening is not None and self.opening < 0:
            raise UserError(f"opening: expected 0 (all of a text) or more sentences, got {self.opening}")


@dataclass(frozen=True)
class HeadJob:
    """A head to train, and where it is written.

    Attributes:
        material: models and data.
        out: directory to write; it must not exist.
        kind: what the head predicts: acceptance is Pr(accepted), for the stopper acceptance; log_ratio is log(p/q), for
            the stopper ratio.
        depth: number of residual SiLU blocks before the output; 0 is a linear head.
        shared_blocks: use one set of weights for all blocks, as in the published code of SpecDec++.
        reads_draw: also read log q of the drawn token, which the hidden state does not contain; verifiers only.
        labels: weights of the loss, and lambda.
        plan: steps and learning rate.
        batch: number of tokens in a step.
        mix: token mixing as in SpecDec++, with this share of the target's tokens (0.15 in the paper); by default the
            head is trained on the draft model's own continuations, which are closer to a run.
        threshold: threshold h of the stopper; by default the one with the least time per token in the trials, by the
            cost model.
        sweep: try every depth and weight at every threshold, and take the one with the least time per token.
        cost_ratio: time of a draft pass divided by the time of a target pass; by default both are measured.
        trial_prompts: number of held-out prompts in the trials.
        trial_tokens: largest number of tokens of each response in the trials.
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
            raise UserError(f"mix: expected 0 or more and less than 1, got {self.mix:g}")
        refuse_outside("threshold", self.threshold or 0, 0, 1)
        if self.cost_ratio is not None and not 0 < self.cost_ratio < 1:
            raise UserError(f"cost ratio: expected a number between 0 and 1, got {self.cost_ratio:g}")
        refuse_below_one(batch=self.batch, trial_prompts=self.trial_prompts)
        refuse_existing(self.out)

    @property
    def work(self) -> Path:
        """The directory of checkpoints, until the artefact is written."""
        return self.out.parent / f"{self.out.name}.work"
