"""Training a language model: from scratch on text, or to imitate a target whose vocabulary it shares.

OUT is written whole or not at all. Until then the tokenizer and the checkpoint are in OUT.work, and the same command
continues an interrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from draftproof import models
from draftproof.backends.loading.by_name import load_model, refuse_gguf
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer, refuse_different
from draftproof.errors import UserError
from draftproof.files import whole_directory
from draftproof.progress import Watch, silent
from draftproof.provenance import digest, file_digest, fingerprint
from draftproof.rng import fold
from draftproof.training import distil
from draftproof.training.corpus import Batches, TokenStream, held_out, stream
from draftproof.training.data import Example, read_examples, split
from draftproof.training.drafter_options import PROMPT, DrafterJob, settings_of
from draftproof.training.loop import Loss, Record, TrainingPlan, train


class DrafterRun:
    """One run of a job: its texts, tokenizer and models."""

    def __init__(self, job: DrafterJob, watch: Watch = silent) -> None:
        self.job = job
        self.watch = watch
        self.start = time.perf_counter()
        for name in (job.init, None if job.imitation is None else job.imitation.target):
            if name is not None:
                refuse_gguf(name, "training a draft model")
        self.settings = job.settings if job.init is None else settings_of(Path(models.resolve(job.init), "config.json"))
        positions = self.settings["max_position_embeddings"]
        if job.length > positions:
            raise UserError(f"length: expected at most the {positions} tokens that the model reads, got {job.length}")
        examples, self.sources = read_examples(job.texts.data, form=job.texts.form, opening=1)
        self.parts = split(examples, job.texts.limit)
        self.background: list[Example] = []
        if job.texts.background:
            form = job.texts.background_form
            self.background, sources = read_examples(job.texts.background, form=form, opening=0)
            self.sources += sources
        self.device = torch.device(job.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    # --- tokens ---------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or that of the initial model, or one that is trained on these texts."""
        init, target = self.job.init, None if self.job.imitation is None else self.job.imitation.target
        found = {name: load_tokenizer(models.resolve(name)) for name in (target, init) if name is not None}
        if target is not None and init is not None:
            refuse_different(found[target], found[init], target_name=target, draft_name=init)
        if found:
            return next(iter(found.values()))
        folder = self.job.work / "tokenizer"
        if not folder.exists():
            size, positions = self.job.shape.vocabulary, self.settings["max_position_embeddings"]
            made = train_tokenizer(self._balanced(), size, positions=positions)
            with whole_directory(folder) as work:
                made.save_pretrained(work)
        return load_tokenizer(str(folder))

    def _balanced(self) -> Iterator[str]:
        """The training texts, and as many characters of the background."""
        texts = [example.text for example in self.parts["train"]]
        room = sum(map(len, texts))
        yield from texts
        for example in self.background:
            yield example.text[:room]
            room -= len(example.text)
            if room <= 0:
                return

    @cached_property
    def end(self) -> int:
        """The token between texts: the tokenizer's end token, or its begin token if the target ends texts with that."""
        found, first = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        if self.target is not None:
            ends = self.target.generation_config.eos_token_id
            found = first if first is not None and isinstance(ends, list) and first in ends else found
        if found is None:
            raise UserError("the target's tokenizer has no end token: choose a target that has one")
        return int(found)

    def ids(self, examples: Sequence[Example]) -> list[list[int]]:
        """Token ids of texts, after the tokens that the tokenizer adds at the start unless these are the end token."""
        texts = [example.text for example in examples]
        before = list(map(int, self.tokenizer("")["input_ids"]))
        before = [] if before == [self.end] else before
        found = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [[*before, *map(int, row)] for row in found]

    def stream(self, examples: Sequence[Example]) -> TokenStream:
        """The texts as one stream of tokens."""
        return stream(self.ids(examples), self.end, length=self.job.length)

    def held_out(self, part: str) -> tuple[Int[Tensor, "windows length"], int]:
        """Windows of a held-out part, and the number of bytes of the texts in them."""
        windows, taken = held_out(self.ids(self.parts[part]), self.end, length=self.job.length, tokens=self.job.held)
        size = sum(len(example.text.encode()) for example in self.parts[part][:taken])
        return windows.to(self.device), size

    # --- models ---------------------------------------------------------------------------------------------------

    @cached_property
    def target(self) -> Any:
        """The frozen model to imitate; None without one."""
        if self.job.imitation is None:
            return None
        made = load_model(
            models.resolve(self.job.imitation.target), LoadOptions(dtype="float32", device=str(self.device))
        )
        return made.requires_grad_(requires_grad=False).eval()

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary of a new model; as large as the target's, padding included."""
        return int(len(self.tokenizer) if self.target is None else self.target.config.vocab_size)

    def model(self) -> Any:
        """The initial model, or an untrained one that depends on the seed only."""
        from transformers import LlamaConfig, LlamaForCausalLM

        if self.job.init is not None:
            found = load_model(models.resolve(self.job.init), LoadOptions(dtype="float32", device=str(self.device)))
            if self.target is not None and found.config.vocab_size != self.vocabulary:
                raise UserError(
                    f"the vocabulary of {self.job.init} has {found.config.vocab_size} tokens, that of its target "
                    f"{self.vocabulary}: both must have the same size"
                )
            return found.requires_grad_(requires_grad=True)
        ends = {"bos_token_id": self.tokenizer.bos_token_id, "eos_token_id": self.end, "pad_token_id": None}
        with torch.random.fork_rng():
            torch.manual_seed(fold(self.job.seed, 9) >> 1)
            config = LlamaConfig(**{**self.settings, "vocab_size": self.vocabulary, **ends})
            made: Any = LlamaForCausalLM(config)
        return made.to(self.device)

    @property
    def identity(self) -> str:
        """A hash of everything that decides the model, which identifies the run of a checkpoint."""
        job, goal = self.job, self.job.imitation
        files = [file_digest(path) for path in sorted(job.work.glob("tokenizer/tokenizer.json"))]
        imitation = None if goal is None else (fingerprint(goal.target), goal.loss, goal.policy, goal.share)
        texts = (job.texts.form, job.texts.limit, job.texts.background_form, job.texts.share)
        facts = (self.settings, self.vocabulary, texts, files, imitation, job.rows, job.length, job.held, job.precision)
        init = [] if job.init is None else [fingerprint(job.init)]
        return digest([asdict(source) for source in self.sources], facts, self.device.type, *init)

    # --- training -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> TrainingPlan:
        """The job's plan with twenty evaluations on held-out text; the weights of the best one are the result."""
        plan = self.job.plan
        every = plan.evaluate_every or max(plan.steps // 20, 1)
        best = "bits_per_byte" if self.job.imitation is None else "rejection"
        return replace(plan, seed=self.job.seed, evaluate_every=every, keep_best=best)

    def train(self) -> tuple[Any, list[Record]]:
        """The trained model and its history."""
        job = self.job
        plan = self.plan
        batches = Batches(
            main=self.stream(self.parts["train"]),
            background=self.stream(self.background) if self.background else None,
            share=job.texts.share if self.background else 0.0,
            rows=job.rows,
            length=job.length,
            steps=plan.steps,
            seed=job.seed,
        )
        windows, size = self.held_out("valid")
        model = self.model()
        history = train(
            model,
            lambda step: batches(step).to(self.device),
            self.loss,
            plan,
            checkpoint=job.work / "checkpoint.safetensors",
            identity=self.identity,
            evaluate=lambda module: self.evaluate(module, windows, size),
            watch=self.watch,
        )
        return model, history

    def loss(self, module: nn.Module, windows: Int[Tensor, "rows length"]) -> Loss:
        """The loss of a batch: cross-entropy, or the distance from the target."""
        low, goal = self.job.precision == "bfloat16", self.job.imitation
        if goal is None:
            return Loss(distil.text_loss(module, windows, low=low), windows.numel())
        given = 0
        if goal.policy != "text" and float(torch.rand(())) < goal.share:
            writer = module if goal.policy == "draft" else self.target
            windows, given = distil.sampled(writer, windows[:, :PROMPT], windows.shape[1]), PROMPT - 1
        with torch.no_grad():
            log_p = distil.logits_of(self.target, windows[:, :-1], low=low)[:, given:].log_softmax(-1)
        log_q = distil.logits_of(module, windows[:, :-1], low=low)[:, given:].log_softmax(-1)
        return Loss(distil.LOSSES[goal.loss](log_p, log_q).mean(), windows.numel())

    def evaluate(self, model: nn.Module, windows: Int[Tensor, "windows length"], size: int) -> dict[str, float]:
        """Figures of a model on held-out text: bits per byte; with a target also acceptance and rejection."""
        found = {"bits_per_byte": distil.bits_per_byte(model, windows, size)}
        if self.target is not None:
            found |= distil.agreement(self.target, model, windows)
            found["rejection"] = 1 - found["acceptance"]
        return found


END = "<|endoftext|>"
_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocabulary: int, *, positions: int) -> Any:
    """A tokenizer with all bytes, one token that begins and ends a text, and the merges that shorten texts most."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary <= _BYTES:
        raise UserError(f"vocabulary: expected more than {_BYTES} tokens (bytes and an end token), got {vocabulary}")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if made.get_vocab_size() < vocabulary:
        raise UserError(
            f"the texts give {made.get_vocab_size()} tokens, not {vocabulary}: choose a smaller vocabulary or more text"
        )
    made.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made,
        bos_token=END,
        eos_token=END,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
