"""What `train drafter` is asked for: a shape, texts, a target to imitate, where the model goes.

Knows: which options are legal. Does not know: how anything is trained.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import UserError, reason
from draftproof.training.distil import LOSSES
from draftproof.training.loop import TrainingPlan

POLICIES = ("text", "draft", "target")
PROMPT = 16  # tokens of a text that a model continues, where it is trained on what it writes
PRECISIONS = ("float32", "bfloat16")
_FURTHER = ("rope_theta", "rope_parameters", "rms_norm_eps", "head_dim", "attention_bias", "mlp_bias", "hidden_act")


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model in a few numbers.

    Attributes:
        layers, width, heads: of the decoder.
        kv_heads: heads of keys and values; 0 is as many as heads.
        hidden: width of the feed-forward layers; 0 is 8/3 of the width, rounded up to a multiple of 32.
        positions: the longest sequence.
        vocabulary: tokens of a tokenizer that is trained with the model; a target's own is taken as it is.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 0
    hidden: int = 0
    positions: int = 512
    vocabulary: int = 2048

    def __post_init__(self) -> None:
        low = {name: value for name, value in asdict(self).items() if value < (name not in ("kv_heads", "hidden"))}
        if low:
            name, value = next(iter(low.items()))
            raise UserError(f"{name} is {value}: legal is 1 or more")
        if self.width % (2 * self.heads):
            raise UserError(f"width {self.width} with {self.heads} heads: legal is a multiple of twice the heads")
        if self.heads % (self.kv_heads or self.heads):
            raise UserError(f"{self.heads} heads with {self.kv_heads} of keys and values: legal are divisors of heads")

    def config(self) -> dict[str, Any]:
        """Arguments of transformers' LlamaConfig, without the vocabulary."""
        return {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "intermediate_size": self.hidden or -(-self.width * 8 // 3 // 32) * 32,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True)
class Texts:
    """What is read.

    Attributes:
        data: files of the text that the model shall write; a tenth is held out to choose weights, a tenth to judge.
        form: how texts stand in .txt files.
        limit: texts of data to use; None is all.
        background: files of further text in the same language, read mostly early in the run.
        background_form: how texts stand in those.
        share: of the background over the whole run; it falls linearly from twice that to nothing, or from everything.
    """

    data: tuple[Path, ...]
    form: str = "lines"
    limit: int | None = None
    background: tuple[Path, ...] = ()
    background_form: str = "documents"
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"background share is {self.share:g}: legal are 0 to 1")


@dataclass(frozen=True)
class Imitation:
    """A target to imitate.

    Attributes:
        target: its name; the draft takes its tokenizer and vocabulary.
        loss: kl, reverse_kl or tv, see training.distil.
        policy: what the two are compared on: text, or what the draft or the target continues it with.
        share: of the steps that read continuations where the policy is not text.
    """

    target: str
    loss: str = "kl"
    policy: str = "text"
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise UserError(f"loss is {self.loss!r}: legal are {', '.join(LOSSES)}")
        if self.policy not in POLICIES:
            raise UserError(f"policy is {self.policy!r}: legal are {', '.join(POLICIES)}")
        if not 0 < self.share <= 1:
            raise UserError(f"share of continuations is {self.share:g}: legal is above 0, up to 1")


@dataclass(frozen=True)
class DrafterJob:
    """What shall be trained, and where it goes.

    Attributes:
        texts: data.
        out: directory to make.
        shape: of the model.
        config: a config.json of a Llama-shaped model that stands for the shape.
        init: name of a model to go on from, with its shape and tokenizer; None starts from random weights.
        imitation: the target to imitate; None trains on the text alone.
        plan: steps and learning rate.
        rows, length: windows a step, and tokens a window.
        held: tokens of each held-out part that are looked at.
        precision: of the products in training: float32 or bfloat16. Weights are float32.
        stored: of the weights in OUT: float32, float16 or bfloat16; it loads as float32.
        device: where; None is the CPU, or an accelerator if there is one.
        seed: of everything.
        trial_prompts: openings of test texts that the engine continues, for the block efficiencies of a draft.
        trial_tokens: most tokens of each continuation.
    """

    texts: Texts
    out: Path
    shape: Shape = Shape()
    config: Path | None = None
    init: str | None = None
    imitation: Imitation | None = None
    plan: TrainingPlan = TrainingPlan(steps=2000, learning_rate=2e-3, warmup=100)  # noqa: RUF009 - frozen
    rows: int = 8
    length: int = 256
    held: int = 16384
    precision: str = "float32"
    stored: str = "float32"
    device: str | None = None
    seed: int = 0
    trial_prompts: int = 16
    trial_tokens: int = 128

    def __post_init__(self) -> None:
        if min(self.rows, self.held, self.trial_prompts, self.trial_tokens) < 1 or self.length < PROMPT + 2:
            raise UserError(
                f"rows is {self.rows}, held-out tokens {self.held}, length {self.length}, trials {self.trial_prompts} "
                f"of {self.trial_tokens} tokens: legal are 1 or more, and a length of {PROMPT + 2} or more"
            )
        if self.precision not in PRECISIONS:
            raise UserError(f"precision is {self.precision!r}: legal are {', '.join(PRECISIONS)}")
        if self.stored not in (*PRECISIONS, "float16"):
            raise UserError(f"stored is {self.stored!r}: legal are {', '.join((*PRECISIONS, 'float16'))}")
        if self.out.exists():
            raise UserError(f"{self.out} exists already: name a path that does not, or remove it first")

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of LlamaConfig but the vocabulary: the shape's, or those of a file.

        Raises:
            UserError: a file that is no such config.
        """
        return self.shape.config() if self.config is None else settings_of(self.config)

    @property
    def work(self) -> Path:
        """Where tokenizer and checkpoint lie until the artefact is made."""
        return self.out.parent / f"{self.out.name}.work"


def settings_of(path: Path) -> dict[str, Any]:
    """Arguments of LlamaConfig from a config.json.

    Raises:
        UserError: none to be had there.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {name: found[name] for name in (*Shape().config(), *_FURTHER) if name in found}
    except (OSError, ValueError, TypeError) as cause:
        raise UserError(f"cannot read a config from {path}: {reason(cause)}") from cause
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    if missing := [name for name in needed if name not in known]:
        raise UserError(f"{path} is no config of a Llama-shaped model: it lacks {missing[0]}")
    return {"max_position_embeddings": 512, **known}
