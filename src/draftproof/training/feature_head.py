"""Training a feature head from its options to its directory: data, training, evaluation, runs of the engine."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from draftproof import models
from draftproof.backends.heads.feature_head import FeatureBackend, refuse_other_target
from draftproof.backends.heads.feature_net import FeatureConfig, FeatureNet, load_net, save_net
from draftproof.backends.heads.published.eagle3 import eagle3_backend
from draftproof.backends.heads.published.peagle import PEagleBackend
from draftproof.backends.loading.by_name import load_backend, refuse_gguf
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.backends.model_info import end_tokens
from draftproof.drafters.base import Drafter
from draftproof.drafters.head import HeadDraftModel, head_drafter
from draftproof.engine.engine import Engine
from draftproof.engine.stats import total_stats
from draftproof.errors import UserError
from draftproof.files import whole_directory, write_json
from draftproof.heads import WEIGHTS
from draftproof.progress import Watch, silent
from draftproof.provenance import FILE, digest, file_digest, fingerprint, provenance
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.training.data import DataFile, Example, cache_folder, read_examples, split
from draftproof.training.eagle3_net import Eagle3Module, PEagleModule, default_layers, save_eagle3
from draftproof.training.feature_loss import Frame, Net, acceptance, feature_loss
from draftproof.training.feature_options import FORMATS, FeatureJob
from draftproof.training.feature_rows import FeatureStore, StateRows, TrainingRow, frequent, windows
from draftproof.training.loop import Record, train
from draftproof.training.responses import instruction_ids, sample_responses
from draftproof.training.sweep import pass_costs

_BATCH = 32  # number of answers that are sampled at once, so that the weights are read once for all of them
_COUNTED = 4000  # least number of windows of text in which tokens are counted


_DECIDING = (
    "answers", "answer_tokens", "answers_each", "form", "windows", "length", "batch", "ids", "inner_size",
    "own_output", "unroll", "tv", "states", "dtype", "format",
)  # fmt: skip


def make_feature_head(job: FeatureJob, watch: Watch = silent) -> dict[str, Any]:
    """Train a feature head, write its directory and return its figures; the same job continues an interrupted run."""
    start = time.perf_counter()
    run = _FeatureRun(job, watch)
    net = run.net()
    frame = run.frame(net)
    history = run.train(net, frame)
    metrics: dict[str, Any] = {name: acceptance(net, rows, frame) for name, rows in run.held_out.items()}
    metrics["runs"] = {name: run.run(net, prompts) for name, prompts in run.trials.items()}
    origin = provenance(
        data=[asdict(source) for source in run.sources],
        seed=job.plan.seed,
        metrics=metrics,
        seconds=time.perf_counter() - start,
        device=run.target.device,
        models={Path(job.target).name: run.fingerprint},
        options={**run.options, "plan": asdict(job.plan)},
        rows={"text": len(run.text_rows), "answers": len(run.answer_rows["train"])},
    )
    with whole_directory(job.out) as folder:
        run.save(net, folder)
        write_json(folder / FILE, {**origin, "history": history})
    shutil.rmtree(job.work, ignore_errors=True)
    return metrics


class _FeatureRun:
    """One run of a job: the target, its tokenizer, and everything that is made from the data."""

    def __init__(self, job: FeatureJob, watch: Watch) -> None:
        self.job = job
        self.watch = watch
        self.cache = cache_folder(job.cache)
        refuse_gguf(job.target, "training a feature head", " (a head trained on that drafts for this file, too)")
        self.tokenizer = load_tokenizer(models.resolve(job.target))
        self.target = load_backend(job.target, LoadOptions(dtype=job.dtype, device=job.device))
        self.fingerprint = fingerprint(job.target)
        self.eos = end_tokens(self.target.eos_token_ids, self.tokenizer.eos_token_id)
        self.sources: list[DataFile] = []

    # --- data -----------------------------------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """The options that decide the head, besides data and plan."""
        found = {name: getattr(self.job, name) for name in _DECIDING}
        return found if self.job.start is None else {**found, "start": file_digest(self.job.start / WEIGHTS)}

    def _read(self, files: Sequence[Path]) -> list[Example]:
        if not files:
            return []
        examples, sources = read_examples(files, form=self.job.form, opening=0)
        self.sources += [source for source in sources if source not in self.sources]
        return examples

    def _windows(self, texts: Sequence[str], most: int) -> list[TrainingRow]:
        return windows(texts, self.tokenizer, length=self.job.length, most=most, seed=self.job.plan.seed)

    @cached_property
    def _texts(self) -> tuple[list[str], list[str]]:
        """Texts for training, and texts for evaluation."""
        texts = [example.text for example in self._read(self.job.data)]
        if self.job.held_out:
            return texts, [example.text for example in self._read(self.job.held_out)]
        parts = split([Example(text, text) for text in texts])
        kept = {example.text for example in parts["test"]}
        return [text for text in texts if text not in kept], [text for text in texts if text in kept]

    @cached_property
    def text_rows(self) -> list[TrainingRow]:
        """Windows of text for training."""
        found = self._windows(self._texts[0], self.job.windows)
        if not found:
            raise UserError(
                f"the data hold no window of {self.job.length} tokens: pass more text, or choose a lower length"
            )
        return found

    @cached_property
    def _instructions(self) -> dict[str, list[list[int]]]:
        """Token ids of the instructions of each part, in the chat template if there is one."""
        examples = self._read(self.job.prompts)
        if not examples:
            return {"train": [], "test": []}
        parts, engine = split(examples, self.job.answers), self._engine()
        ids = {name: [instruction_ids(engine, each.text) for each in parts[name]] for name in ("train", "test")}
        return {name: [row for row in rows if len(row) < self.job.length // 2] for name, rows in ids.items()}

    def _engine(self) -> Engine:
        return Engine(self.target, tokenizer=self.tokenizer, eos_token_ids=self.eos, max_batch=_BATCH)

    @cached_property
    def answer_rows(self) -> dict[str, list[TrainingRow]]:
        """Instructions with the target's answers; only the answers are learnt."""
        parts = self._instructions
        kinds = {"train": parts["train"] * self.job.answers_each, "test": parts["test"]}
        return {name: self._answers(name, rows) for name, rows in kinds.items()}

    @property
    def _key(self) -> str:
        """Identifies the target and how it is run, for the cache."""
        return digest(self.fingerprint, self.job.dtype, self.target.device.type)

    def _answers(self, name: str, prompts: list[list[int]]) -> list[TrainingRow]:
        if not prompts:
            return []
        engine, params = self._engine(), SamplingParams(max_tokens=self.job.answer_tokens)
        options: dict[str, Any] = {"seed": self.job.plan.seed, "watch": self.watch, "title": f"answers ({name})"}
        found = sample_responses(engine, prompts, params, cache=self.cache, key=self._key, **options)
        return [
            TrainingRow(tuple(each.whole[: self.job.length]), len(each.prompt) - 1) for each in found if each.tokens
        ]

    @cached_property
    def store(self) -> FeatureStore:
        """The training rows: answers, then texts."""
        return self._store(self.answer_rows["train"], self.text_rows)

    def _store(self, *kinds: Sequence[TrainingRow]) -> FeatureStore:
        options: dict[str, Any] = {"length": self.job.length, "cache": self.cache, "key": self._key}
        return FeatureStore(self.target, kinds, layers=self.layers, **options)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the target whose states the head reads, where it reads several."""
        return () if self.job.format == FORMATS[0] else default_layers(self.target.facts.layers)

    @cached_property
    def held_out(self) -> dict[str, StateRows]:
        """Rows for evaluation, one shard of each kind."""
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

    def net(self) -> Net:
        """The head to continue from, or a new one with the shape of a layer of the target."""
        if self.job.start is not None:
            found = load_net(self.job.start)
            refuse_other_target(found, self.target)
            if found.output is None:  # without an output layer, the head's tokens can be chosen again
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
            layers=self.target.facts.layers,
        )
        with torch.random.fork_rng():
            torch.manual_seed(job.plan.seed)
            net = self._fresh(config)
        net.ids.copy_(self._ids(config))
        if net.output is not None:
            net.output.weight.data.copy_(self.target.output_rows(net.ids))
        return net.to(self.target.device)

    def _fresh(self, config: FeatureConfig) -> Net:
        """A head of the job's format with random weights."""
        if self.job.format == "eagle3":
            return Eagle3Module(config, self.layers)
        if self.job.format == "peagle":
            return PEagleModule(config, self.layers, mask_token=next(iter(self.eos), 0), places=self.job.unroll)
        return FeatureNet(config)

    def _ids(self, config: FeatureConfig) -> Int[Tensor, " ids"]:
        """The tokens that the head can draft: the most frequent ones of the training rows."""
        kinds = [self._windows(self._texts[0], max(self.job.windows, _COUNTED)), self.answer_rows["train"]]
        return torch.tensor(frequent(kinds, config.ids, config.vocab_size, always=self.eos))

    def frame(self, net: Net) -> Frame:
        """The parts of the target and the options of the loss."""
        job = self.job
        return Frame(
            embed=self.target.model.get_input_embeddings(),
            output=self.target.output_rows(net.ids),
            unroll=job.unroll,
            tv=job.tv,
            states=job.states,
            autocast=self.target.dtype == torch.bfloat16,
        )

    def train(self, net: Net, frame: Frame) -> list[Record]:
        """Train the head, and return the history."""
        job, device = self.job, self.target.device
        store, held_out = self.store, self.held_out

        def evaluate(module: nn.Module) -> Record:
            assert isinstance(module, FeatureNet | Eagle3Module), "the module that is trained"
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

    def run(self, net: Net, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Tokens per target call with four drafted tokens and block verification, and the time of a draft step."""
        engine = Engine(self.target, self._drafter(net), tokenizer=self.tokenizer, eos_token_ids=self.eos, max_batch=1)
        params = SamplingParams(max_tokens=96, seed=self.job.plan.seed)
        stats = [output.stats for output in engine.generate([list(prompt) for prompt in prompts], params)]
        costs = pass_costs(total_stats(stats))
        return {
            "block_efficiency": statistics.fmean(one.block_efficiency for one in stats),
            "draft_step_ms": 1000 * costs.draft,
            "target_call_ms": 1000 * costs.target,
        }

    def save(self, net: Net, folder: Path) -> None:
        """Write the head's files."""
        if isinstance(net, FeatureNet):
            save_net(net, folder)
            return
        embedding = self.target.model.get_input_embeddings().weight.detach()
        save_eagle3(
            net,
            folder,
            embedding=embedding,
            output=self.target.output_rows(net.ids),
            architectures=list(self.target.model.config.architectures or []),
            max_positions=self.target.facts.max_positions or self.job.length,
        )

    def _drafter(self, net: Net) -> Drafter:
        """A drafter of four tokens from the head as it is stored."""
        if isinstance(net, FeatureNet):
            model = HeadDraftModel(FeatureBackend(self.target, _as_stored(net)), self.target)
            return head_drafter(model, FixedLength(4), "feature_head")
        with tempfile.TemporaryDirectory() as folder:
            self.save(net, Path(folder))
            read = PEagleBackend if isinstance(net, PEagleModule) else eagle3_backend
            model = HeadDraftModel(read(folder, self.target), self.target)
        return head_drafter(model, FixedLength(4), net.algorithm)


def _as_stored(net: FeatureNet) -> FeatureNet:
    """A copy of the head with its weights rounded to bfloat16, as they are stored."""
    made = FeatureNet(net.config)
    rounded = {n: value.bfloat16() if value.is_floating_point() else value for n, value in net.state_dict().items()}
    made.load_state_dict(rounded)
    return made.requires_grad_(requires_grad=False).eval()
