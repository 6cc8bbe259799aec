"""Options of `train drafter`: the shape, the texts, a target to imitate, and where the model is written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import UserError, reason, refuse_below_one, refuse_outside, refuse_unknown
from draftproof.files import refuse_existing
from draftproof.training.distil import LOSSES
from draftproof.training.loop import TrainingPlan

POLICIES = ("text", "draft", "target")
PROMPT = 16  # tokens of a text that a model continues, where it is trained on continuations
PRECISIONS = ("float32", "bfloat16")
_OPTIONAL = ("rope_theta", "rope_parameters", "rms_norm_eps", "head_dim", "attention_bias", "mlp_bias", "hidden_act")


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama model.

    Attributes:
        layers: number of decoder layers.
        width: width of the hidden states.
        heads: number of attention heads.
        kv_heads: number of key and value heads; 0 is as many as attention heads.
        hidden: width of the feed-forward layers; 0 is 8/3 of the width, rounded up to a multiple of 32.
        positions: length of the longest sequence, in tokens.
        vocabulary: number of tokens of the tokenizer that is trained with the model; not used with a target to imitate,
            whose tokenizer is used.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 0
    hidden: int = 0
    positions: int = 512
    vocabulary: int = 2048

    def __post_init__(self) -> None:
        chosen = {name: value for name, value in asdict(self).items() if value or name not in ("kv_heads", "hidden")}
        refuse_below_one(**chosen)
        if self.width % (2 * self.heads):
            raise UserError(f"width: expected a multiple of twice the heads ({2 * self.heads}), got {self.width}")
        if self.heads % (self.kv_heads or self.heads):
            raise UserError(f"kv heads: expected a divisor of the {self.heads} heads, got {self.kv_heads}")

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
    """The texts that a model is trained on.

    Attributes:
        data: text to learn: .txt or .jsonl, also .gz and .xz; can be repeated. One tenth of the texts is held out to
            choose the weights, and one tenth to evaluate them.
        form: how texts are separated in .txt files: lines, paragraphs, stories or documents.
        limit: number of texts of the data to use; by default all.
        background: more text in the same language, used mostly early in the run; can be repeated.
        background_form: how texts are separated in the background files.
        share: share of the background over the whole run. It falls linearly from twice this value to 0; above one half
            it starts at 1.
    """

    data: tuple[Path, ...]
    form: str = "lines"
    limit: int | None = None
    background: tuple[Path, ...] = ()
    background_form: str = "documents"
    share: float = 0.5

    def __post_init__(self) -> None:
        refuse_outside("background share", self.share, 0, 1)


@dataclass(frozen=True)
class Imitation:
    """A target to imitate.

    Attributes:
        target: the target to imitate: registered name, hub id or directory; the model gets its tokenizer.
        loss: distance to minimise: kl is KL(target || draft), reverse_kl is KL(draft || target), tv is the probability
            of a rejection.
        policy: texts on which the models are compared: text, or also continuations of it by the draft or the target.
        share: share of the steps that use continuations, where the policy is not text.
    """

    target: str
    loss: str = "kl"
    policy: str = "text"
    share: float = 0.5

    def __post_init__(self) -> None:
        refuse_unknown("loss", self.loss, LOSSES)
        refuse_unknown("policy", self.policy, POLICIES)
        if not 0 < self.share <= 1:
            raise UserError(f"share of continuations: expected more than 0, up to 1, got {self.share:g}")


@dataclass(frozen=True)
class DrafterJob:
    """A language model to train, and where it is written.

    Attributes:
        texts: the data.
        out: directory to write; it must not exist.
        shape: shape of the model.
        config: a config.json of a Llama model, used instead of the shape.
        init: the initial model, with its shape and tokenizer: name or directory; by default random weights.
        imitation: the target to imitate; None trains on the text alone.
        plan: steps and learning rate.
        rows: number of windows of text in a step.
        length: number of tokens in a window.
        held: number of tokens of each held-out part that are used.
        precision: precision of the matrix products in training: float32 or bfloat16; weights are float32.
        stored: dtype of the weights in the directory: float32, float16 or bfloat16; they are loaded as float32.
        device: device to use: cpu, cuda or cuda:1; by default an accelerator if there is one.
        seed: seed of all random choices.
        trial_prompts: number of held-out prompts that the engine continues, for the block efficiencies of a draft.
        trial_tokens: largest number of tokens of each continuation.
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
        counts = {"trial_prompts": self.trial_prompts, "trial_tokens": self.trial_tokens}
        refuse_below_one(rows=self.rows, held_out_tokens=self.held, **counts)
        if self.length < PROMPT + 2:
            raise UserError(f"length: expected {PROMPT + 2} or more, got {self.length}")
        refuse_unknown("precision", self.precision, PRECISIONS)
        refuse_unknown("stored", self.stored, (*PRECISIONS, "float16"))
        refuse_existing(self.out)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of LlamaConfig except the vocabulary, from the shape or from the config file."""
        return self.shape.config() if self.config is None else settings_of(self.config)

    @property
    def work(self) -> Path:
        """The directory of tokenizer and checkpoint, until the artefact is written."""
        return self.out.parent / f"{self.out.name}.work"


def settings_of(path: Path) -> dict[str, Any]:
    """Arguments of LlamaConfig except the vocabulary, from a config.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {name: found[name] for name in (*Shape().config(), *_OPTIONAL) if name in found}
    except (OSError, ValueError, TypeError) as cause:
        raise UserError(f"cannot read a config from {path}: {reason(cause)}") from cause
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    if missing := [name for name in needed if name not in known]:
        raise UserError(f"{path} is no config of a Llama model: it lacks {missing[0]}")
    return {"max_position_embeddings": 512, **known}
