"""Options of `train feature-head`: the target, the data, the head, the loss, and where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftproof.errors import UserError, refuse_below_one, refuse_outside, refuse_unknown
from draftproof.files import refuse_existing
from draftproof.training.loop import TrainingPlan

FORMATS = ("draftproof", "eagle3", "peagle")


@dataclass(frozen=True)
class FeatureJob:
    """A feature head to train, and where it is written.

    Attributes:
        target: the target: registered name, hub id or directory.
        out: directory to write; it must not exist.
        plan: steps and learning rate.
        data: texts: .txt or .jsonl, also .gz and .xz; can be repeated.
        held_out: texts that are used for evaluation only; can be repeated; by default a tenth of the data.
        prompts: instructions; the target's own answers to them are used for training too; can be repeated.
        answers: number of instructions to use; by default all.
        answer_tokens: largest number of tokens in an answer.
        answers_each: number of different answers to every training instruction.
        form: how texts are separated in .txt files: lines, paragraphs, stories or documents.
        windows: number of windows of text to use; the target's states for them are kept in the cache.
        length: number of tokens in a window, which is also how far back the head's attention reaches.
        batch: number of windows in a step: 1, 2, 4, 8, 16 or 32.
        ids: number of tokens that the head can draft, the most frequent ones; all others have q = 0, which stays exact.
        inner_size: width of the head's feed-forward layer; by default the target's.
        own_output: train an output layer, initialised with the target's; by default rows of the target's are used.
        start: directory of a feature head to continue from; it keeps its shape, and its tokens if it has an output
            layer.
        unroll: number of steps of the loss, 1 to 8; all but the first are on the head's own states, or with format
            peagle on masked places, and it is the number of tokens that the head drafts then.
        tv: weight of the total variation, in addition to the cross-entropy.
        states: weight of the smooth L1 distance to the target's states.
        format: the format of the head: draftproof, read by drafter feature_head; eagle3, the layout of `speculators`
            with the states of a low, a middle and a high layer, read by drafter eagle3 and by other engines; or peagle,
            the same with masked places, which drafts all tokens in one pass.
        trial_prompts: number of held-out prompts of each kind for runs of the engine.
        dtype: dtype of the target: auto, float32, bfloat16 or float16.
        device: device to use: cpu, cuda or cuda:1; by default an accelerator if there is one.
        cache: directory that keeps answers and states for other runs; by default one next to the pulled models.
    """

    target: str
    out: Path
    plan: TrainingPlan
    data: tuple[Path, ...]
    held_out: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()
    answers: int | None = None
    answer_tokens: int = 192
    answers_each: int = 1
    form: str = "paragraphs"
    windows: int = 4000
    length: int = 256
    batch: int = 4
    ids: int = 8192
    inner_size: int | None = None
    own_output: bool = False
    start: Path | None = None
    unroll: int = 3
    tv: float = 0.0
    states: float = 0.0
    format: str = "draftproof"
    trial_prompts: int = 8
    dtype: str = "auto"
    device: str | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        refuse_existing(self.out)
        refuse_unknown("format", self.format, FORMATS)
        if self.format != FORMATS[0] and self.start is not None:
            raise UserError(f"start continues a head of format {FORMATS[0]}, and the format is {self.format}")
        if self.batch < 1 or 32 % self.batch:
            raise UserError(f"batch: expected 1, 2, 4, 8, 16 or 32 windows, got {self.batch}")
        refuse_below_one(answers_each=self.answers_each, windows=self.windows)
        if self.length < 8:
            raise UserError(f"length: expected 8 tokens or more, got {self.length}")
        least = 2 if self.format == "peagle" else 1  # a peagle head drafts that many tokens in one pass
        refuse_outside("unroll", self.unroll, least, 8, f" for format {self.format}")

    @property
    def work(self) -> Path:
        """The directory of the checkpoint, until the artefact is written."""
        return self.out.parent / f".{self.out.name}.training"
