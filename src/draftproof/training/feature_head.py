"""From options to a feature head: data, training, held-out figures, runs of the engine, the artefact.

Knows: the order of things, what is written. Does not know: losses, files of states, the training loop.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from draftproof import models
from draftproof.backends.feature_head import refuse_other_target
from draftproof.backends.feature_net import WEIGHTS, FeatureConfig, FeatureNet, load_net, save_net
from draftproof.backends.loading import load_backend
from draftproof.drafters.feature_head import FeatureModel, feature_drafter
from draftproof.engine.engine import Engine
from draftproof.errors import UserError
from draftproof.files import whole_directory
from draftproof.progress import Watch, silent
from draftproof.provenance import FILE, digest, file_digest, fingerprint, provenance, write_json
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.tokenization import load_tokenizer
from draftproof.training.data import DataFile, Example, read_examples, split
from draftproof.training.feature_loss import Frame, acceptance, feature_loss
from draftproof.training.feature_rows import Row, StateRows, Store, frequent, windows
from draftproof.training.loop import Record, TrainingPlan, train
from draftproof.training.responses import sample_responses

_TOGETHER = 32  # answers sampled at once: one reading of the weights serves all
_COUNTED = 4000  # windows of text, at least, whose tokens are counted


@dataclass(frozen=True)
class FeatureJob:
    """What a feature head is made of.

    Attributes:
        target: name of the target.
        out: directory to write.
        plan: of the training.
        data: files of texts.
        held_out: files of texts that are only measured on; without any, a tenth of `data` by hash.
        prompts: files of instructions that the target answers: eight tenths are taught, one is measured on.
        answers: instructions to use; None is all.
        answer_tokens: most tokens of an answer.
        answers_each: answers to every instruction that is taught, each drawn with a seed of its own.
        form: how texts stand in .txt files.
        windows: windows of text to use.
        length: tokens of a row.
        batch: rows a step; divides the rows of a shard.
        ids: tokens the head speaks of.
        inner_size: of its feed-forward part; None is the target's.
        own_output: an output layer of its own, begun as the target's rows.
        start: directory of a feature head for this target to go on from; its shape is taken over, and its tokens where
            it has an output layer of its own.
        unroll, tv, states: of the loss (`Frame`).
        trial_prompts: held-out prompts of each kind for runs of the engine.
        dtype, device: of the target.
        cache: folder for answers and states; default beside the pulled models.
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
    trial_prompts: int = 8
    dtype: str = "auto"
    device: str | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.out.exists():
            raise UserError(f"{self.out} exists already: name a directory that does not, or remove it first")
        if self.batch < 1 or 32 % self.batch:
            raise UserError(f"batch is {self.batch} rows: legal are 1, 2, 4, 8, 16 and 32")
        if self.answers_each < 1:
            raise UserError(f"answers_each is {self.answers_each}: legal is 1 or more")
        if self.length < 8 or self.windows < 1 or not 1 <= self.unroll <= 8:
            raise UserError(
                f"rows of {self.length} tokens, {self.windows} windows, {self.unroll} steps: "
                "legal are 8 or more, 1 or more, and 1 to 8"
            )

    @property
    def work(self) -> Path:
        """Where the checkpoint is kept until the artefact is written."""
        return self.out.parent / f".{self.out.name}.training"


def make_feature_head(job: FeatureJob, watch: Watch = silent) -> dict[str, Any]:
    """Train a feature head and write it, with its provenance; a run that was killed goes on where it was.

    Returns:
        The figures that sum it up.

    Raises:
        UserError: files, models or options that cannot be used.
    """
    start = time.perf_counter()
    shop = _Shop(job, watch)
    net = shop.net()
    frame = shop.frame(net)
    history = shop.train(net, frame)
    metrics: dict[str, Any] = {name: acceptance(net, rows, frame) for name, rows in shop.held_out.items()}
    metrics["runs"] = {name: shop.run(net, prompts) for name, prompts in shop.trials.items()}
    origin = provenance(
        data=shop.told,
        seed=job.plan.seed,
        metrics=metrics,
        seconds=time.perf_counter() - start,
        device=shop.target.device,
        models={Path(job.target).name: shop.print},
        options={**shop.options, "plan": asdict(job.plan)},
        rows={"text": len(shop.text_rows), "answers": len(shop.answer_rows["train"])},
    )
    with whole_directory(job.out) as folder:
        save_net(net, folder)
        write_json(folder / FILE, {**origin, "history": history})
    shutil.rmtree(job.work, ignore_errors=True)
    return metrics


class _Shop:
    """The target, its tokenizer and everything that is made of the data."""

    def __init__(self, job: FeatureJob, watch: Watch) -> None:
        self.job, self.watch = job, watch
        self.cache = job.cache or models.home().parent / "training"
        self.tokenizer = load_tokenizer(models.resolve(job.target))
        self.target = load_backend(job.target, dtype=job.dtype, device=job.device)
        self.print = fingerprint(job.target)
        self._sources: list[DataFile] = []

    # --- data -----------------------------------------------------------------------------------------------------

    @property
    def told(self) -> list[dict[str, Any]]:
        """The data files as provenance tells of them."""
        return [asdict(source) for source in self._sources]

    @property
    def options(self) -> dict[str, Any]:
        """What decides the head beside data and plan."""
        names = (
            "answers",
            "answer_tokens",
            "answers_each",
            "form",
            "windows",
            "length",
            "batch",
            "ids",
            "inner_size",
            "own_output",
        )
        found = {name: getattr(self.job, name) for name in (*names, "unroll", "tv", "states", "dtype")}
        return found if self.job.start is None else {**found, "start": file_digest(self.job.start / WEIGHTS)}

    def _read(self, files: Sequence[Path]) -> list[Example]:
        if not files:
            return []
        examples, sources = read_examples(files, form=self.job.form, opening=0)
        self._sources += [source for source in sources if source not in self._sources]
        return examples

    def _windows(self, texts: Sequence[str], most: int) -> list[Row]:
        return windows(texts, self.tokenizer, length=self.job.length, most=most, seed=self.job.plan.seed)

    @cached_property
    def _texts(self) -> tuple[list[str], list[str]]:
        """Texts to teach, and texts to measure on."""
        taught = [example.text for example in self._read(self.job.data)]
        if self.job.held_out:
            return taught, [example.text for example in self._read(self.job.held_out)]
        parts = split([Example(text, text) for text in taught])
        kept = {example.text for example in parts["test"]}
        return [text for text in taught if text not in kept], [text for text in taught if text in kept]

    @cached_property
    def text_rows(self) -> list[Row]:
        """Windows of text that are taught."""
        found = self._windows(self._texts[0], self.job.windows)
        if not found:
            raise UserError(f"the data hold no window of {self.job.length} tokens: name more text, or a lower length")
        return found

    @cached_property
    def _instructions(self) -> dict[str, list[list[int]]]:
        """Token ids of the instructions of each part, as the chat template has them where there is one."""
        examples = self._read(self.job.prompts)
        if not examples:
            return {"train": [], "test": []}
        parts, engine = split(examples, self.job.answers), self._engine()
        chat = bool(getattr(self.tokenizer, "chat_template", None))
        asked = {name: [example.text for example in parts[name]] for name in ("train", "test")}
        ids = {
            name: [engine.encode([{"role": "user", "content": text}] if chat else text)[1] for text in texts]
            for name, texts in asked.items()
        }
        return {name: [row for row in rows if len(row) < self.job.length // 2] for name, rows in ids.items()}

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        own = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys((*self.target.eos_token_ids, *([] if own is None else [own]))))

    def _engine(self) -> Engine:
        return Engine(self.target, tokenizer=self.tokenizer, eos_token_ids=self.eos, max_batch=_TOGETHER)

    @cached_property
    def answer_rows(self) -> dict[str, list[Row]]:
        """Instructions with the target's answers, the answers to be learnt from."""
        asked = self._instructions
        kinds = {"train": asked["train"] * self.job.answers_each, "test": asked["test"]}
        return {name: self._answers(name, rows) for name, rows in kinds.items()}

    def _answers(self, name: str, prompts: list[list[int]]) -> list[Row]:
        if not prompts:
            return []
        engine, params = self._engine(), SamplingParams(max_tokens=self.job.answer_tokens)
        key = digest(self.print, self.job.dtype, self.target.device.type)
        options: dict[str, Any] = {"seed": self.job.plan.seed, "watch": self.watch, "title": f"answers ({name})"}
        found = sample_responses(engine, prompts, params, cache=self.cache, key=key, **options)
        return [Row(tuple(each.whole[: self.job.length]), len(each.prompt) - 1) for each in found if each.tokens]

    @cached_property
    def store(self) -> Store:
        """The rows that are taught: answers, then texts."""
        return self._store(self.answer_rows["train"], self.text_rows)

    def _store(self, *kinds: Sequence[Row]) -> Store:
        key = digest(self.print, self.job.dtype, self.target.device.type)
        return Store(self.target, kinds, length=self.job.length, cache=self.cache, key=key)

    @cached_property
    def held_out(self) -> dict[str, StateRows]:
        """Rows to measure on, by kind: a shard of each."""
        kinds = {"text": self._windows(self._texts[1], 32), "answers": self.answer_rows["test"][:32]}
        return {name: self._store(rows).shard(0).to(self.target.device) for name, rows in kinds.items() if rows}

    @cached_property
    def trials(self) -> dict[str, list[list[int]]]:
        """Held-out prompts for runs of the engine, by kind."""
        most, length = self.job.trial_prompts, self.job.length
        texts = [list(row.tokens[: length // 4]) for row in self._windows(self._texts[1], most)]
        kinds = {"text": texts, "answers": self._instructions["test"][:most]}
        return {name: rows for name, rows in kinds.items() if rows}

    # --- the head -------------------------------------------------------------------------------------------------

    def net(self) -> FeatureNet:
        """A head to go on from, or a fresh one, shaped like a layer of the target, for its most frequent tokens."""
        if self.job.start is not None:
            found = load_net(self.job.start)
            refuse_other_target(found, self.target)
            if found.output is None:  # the rows of the target's own layer can be others at any time
                found.ids.copy_(self._ids(found.config))
            return found.requires_grad_().to(self.target.device)
        job, shape = self.job, self.target.config
        width = self.target.capabilities.hidden
        heads = int(shape.num_attention_heads)
        config = FeatureConfig(
            target=Path(job.target).name,
            hidden_size=width,
            vocab_size=self.target.vocab_size,
            heads=heads,
            key_heads=int(getattr(shape, "num_key_value_heads", None) or heads),
            inner_size=job.inner_size or int(getattr(shape, "intermediate_size", None) or 4 * width),
            ids=min(job.ids, self.target.vocab_size),
            own_output=job.own_output,
            window=job.length,
        )
        with torch.random.fork_rng():
            torch.manual_seed(job.plan.seed)
            net = FeatureNet(config)
        net.ids.copy_(self._ids(config))
        if net.output is not None:
            net.output.weight.data.copy_(self.target.output_rows(net.ids))
        return net.to(self.target.device)

    def _ids(self, config: FeatureConfig) -> Int[Tensor, " ids"]:
        """The tokens to speak of: the most frequent ones of what is taught."""
        kinds = [self._windows(self._texts[0], max(self.job.windows, _COUNTED)), self.answer_rows["train"]]
        return torch.tensor(frequent(kinds, config.ids, config.vocab_size, always=self.eos))

    def frame(self, net: FeatureNet) -> Frame:
        """What of the target the loss needs."""
        job = self.job
        return Frame(
            embed=self.target.model.get_input_embeddings(),
            output=self.target.output_rows(net.ids),
            unroll=job.unroll,
            tv=job.tv,
            states=job.states,
            autocast=self.target.dtype == torch.bfloat16,
        )

    def train(self, net: FeatureNet, frame: Frame) -> list[Record]:
        """Train it; returns the history."""
        job, device = self.job, self.target.device
        store, held_out = self.store, self.held_out

        def evaluate(module: nn.Module) -> Record:
            assert isinstance(module, FeatureNet), "the module that is trained"
            found = {name: acceptance(module, rows, frame) for name, rows in held_out.items()}
            return {f"{name}_{key}": value for name, values in found.items() for key, value in values.items()}

        return train(
            net,
            lambda step: store.batch(step, job.batch, job.plan.seed).to(device),
            lambda module, rows: feature_loss(module, rows, frame),  # type: ignore[arg-type]
            job.plan,
            checkpoint=job.work / "checkpoint.safetensors",
            identity=digest(store.key, self.options),
            evaluate=evaluate,
            watch=self.watch,
        )

    def run(self, net: FeatureNet, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Tokens a target call at four drafted tokens with block verification, and the time of a draft step."""
        drafter = feature_drafter(FeatureModel(self.target, _copy(net)), FixedLength(4))
        engine = Engine(self.target, drafter, tokenizer=self.tokenizer, eos_token_ids=self.eos, max_batch=1)
        params = SamplingParams(max_tokens=96, seed=self.job.plan.seed)
        stats = [output.stats for output in engine.generate([list(prompt) for prompt in prompts], params)]
        calls = sum(one.num_target_calls for one in stats)
        steps = sum(one.num_draft_tokens for one in stats)
        seconds = [one.seconds for one in stats]
        per_step = sum(each.draft for each in seconds) / max(steps, 1)
        per_call = sum(each.target for each in seconds) / max(calls, 1)
        return {
            "block_efficiency": statistics.fmean(one.block_efficiency for one in stats),
            "draft_step_ms": 1000 * per_step,
            "target_call_ms": 1000 * per_call,
        }


def _copy(net: FeatureNet) -> FeatureNet:
    """The head as it will be read from its files: rounded to bfloat16."""
    made = FeatureNet(net.config)
    rounded = {n: value.bfloat16() if value.is_floating_point() else value for n, value in net.state_dict().items()}
    made.load_state_dict(rounded)
    return made.requires_grad_(requires_grad=False).eval()
