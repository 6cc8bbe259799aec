"""Loaded models, tokenizers and engines, shared by all cells; draftproof's engine measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draftproof import models
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.loading.by_name import load_model, refuse_gguf
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions, parse_device
from draftproof.backends.loading.options import draft_dtype as read_draft_dtype
from draftproof.backends.loading.tokenization import load_tokenizer, refuse_different, shared_tokens
from draftproof.backends.translation.backend import DraftBackend, over_target
from draftproof.backends.translation.token_map import TokenMap
from draftproof.bench.cell import OURS, Cell, canonical
from draftproof.bench.questions import Question, read_questions
from draftproof.bench.record import Generation
from draftproof.engine.drafter_parts import find_drafter
from draftproof.engine.engine import Engine
from draftproof.engine.stopper_parts import DEFAULT_CONSTANT_STOPPER
from draftproof.errors import UserError
from draftproof.peak import Peak
from draftproof.sampling import SamplingParams
from draftproof.training.responses import instruction_ids

# Continues a prompt: draftproof, or a competitor. `seconds["total"]` runs from token ids to text.
Answerer = Callable[[Sequence[int], SamplingParams], Generation]


class ModelCache:
    """Loads models and tokenizers when a cell first needs them, and keeps them.

    Args:
        device: for all models; by default an accelerator if there is one.
        trust_remote_code: run code that comes with a model.
        tensor_parallel: processes among which targets are divided (see `Engine.load`); this is the first of them.
    """

    def __init__(self, *, device: str | None = None, trust_remote_code: bool = False, tensor_parallel: int = 1) -> None:
        self.device = str(parse_device(device))
        self.processes = tensor_parallel
        self._options: dict[str, Any] = {"device": self.device, "trust_remote_code": trust_remote_code}
        divided = {"device": device, "tensor_parallel": tensor_parallel}
        self._target_options = self._options | (divided if tensor_parallel != 1 else {})
        self._backends: dict[tuple[str, ...], SlotBackend] = {}
        self._models: dict[tuple[str, str], Any] = {}
        self._tokenizers: dict[str, Any] = {}
        self._engines: dict[tuple[str | None, ...], Engine] = {}
        self._shared: dict[tuple[str, str], TokenMap | None] = {}

    def tokenizer(self, name: str) -> Any:
        """The tokenizer of a model."""
        if name not in self._tokenizers:
            trusted = self._options["trust_remote_code"]
            self._tokenizers[name] = load_tokenizer(models.resolve(name), trust_remote_code=trusted)
        return self._tokenizers[name]

    def model(self, name: str, dtype: str) -> Any:
        """A transformers model, for competitors.

        The lean forward pass changes the weights of its model, so competitors get their own copy.
        """
        if self.processes != 1:
            raise UserError(
                f"tensor_parallel is {self.processes}, and competitors have whole models in one process: leave out "
                "--competitor (profiles have competitors, too), or --tensor-parallel"
            )
        refuse_gguf(name, "a competitor")
        key = (name, dtype)
        if key not in self._models:
            self._models[key] = load_model(models.resolve(name), LoadOptions(dtype=dtype, **self._options))
        return self._models[key]

    def backend(self, name: str, dtype: str, backend: str, purpose: str = "", *, whole: bool = False) -> SlotBackend:
        """A model as a backend, loaded once for each purpose; a `whole` one is never divided among processes."""
        options = self._options if whole else self._target_options
        key = (name, dtype, backend, purpose, str(options.get("tensor_parallel", 1)))
        if key not in self._backends:
            self._backends[key] = load(name, LoadOptions(dtype=dtype, backend=backend, **options)).backend
        return self._backends[key]

    def engine(self, cell: Cell, *, max_batch: int = 1) -> Engine:
        """draftproof's engine for a cell; cells that differ only in questions and sampling share it.

        A drafter that learns from earlier requests gets a new engine every time: a result must not depend on the
        answers that were measured before the run was killed.
        """
        parts = (cell.drafter, cell.stopper, cell.verifier)
        key = (cell.target, cell.draft, *parts, cell.dtype, cell.draft_dtype, cell.backend, str(max_batch))
        if key not in self._engines or find_drafter(cell.drafter)[0].learns:
            self._engines[key] = self._assembled(cell, max_batch)
        return self._engines[key]

    def _assembled(self, cell: Cell, max_batch: int) -> Engine:
        # A feature head makes its target keep every hidden state, which would slow down all other cells.
        purpose = "states" if find_drafter(cell.drafter)[0].traits.reads_states else ""
        tokenizer = self.tokenizer(cell.target)
        draft: DraftBackend | None = None
        dtype, _ = read_draft_dtype(cell.draft_dtype, cell.dtype)
        if cell.draft is not None:
            draft = self._draft(cell.target, cell.draft, dtype, cell.backend)
        return Engine.assemble(
            self.backend(cell.target, cell.dtype, cell.backend, purpose),
            draft,
            tokenizer,
            drafter=cell.drafter,
            stopper=cell.stopper or DEFAULT_CONSTANT_STOPPER,
            verifier=cell.verifier or None,
            draft_dtype=cell.draft_dtype,
            max_batch=max_batch,
            prefix_reuse=False,  # each question is measured as if it came first
        )

    def _draft(self, target: str, draft: str, dtype: str, backend: str) -> DraftBackend:
        """A draft model over a target's tokens."""
        pair = (target, draft)
        if pair not in self._shared:
            tokenizers = map(self.tokenizer, pair)
            self._shared[pair] = shared_tokens(*tokenizers, target_name=target, draft_name=draft)
        return over_target(self.backend(draft, dtype, backend, whole=True), self._shared[pair])

    def check_same_tokenizer(self, target: str, draft: str) -> None:
        """Refuse a draft model with another tokenizer."""
        refuse_different(self.tokenizer(target), self.tokenizer(draft), target_name=target, draft_name=draft)

    def pair(
        self, target: str, draft: str, dtype: str, dataset: str, questions: int
    ) -> tuple[SlotBackend, SlotBackend, list[list[int]]]:
        """A target and its draft model, and the first questions of a data set as plain text in tokens."""
        self.check_same_tokenizer(target, draft)
        tokenizer, asked = self.tokenizer(target), read_questions(dataset, questions)
        prompts = [[int(token) for token in tokenizer(question.prompt)["input_ids"]] for question in asked]
        return self.backend(target, dtype, "auto"), self.backend(draft, dtype, "auto"), prompts

    def plain_engine(self, cell: Cell) -> Engine:
        """Plain decoding on a cell's target; it defines for every engine how prompts are encoded and answers end."""
        return self.engine(canonical(replace(cell, engine=OURS, drafter="none")))

    def encode(self, cell: Cell, question: Question) -> list[int]:
        """Token ids of a question, with the target's chat template if the question is a user's message."""
        engine = self.plain_engine(cell)
        ids = instruction_ids(engine, question.prompt) if question.chat else engine.encode(question.prompt)[1]
        most = engine.target.max_positions
        if most is not None and len(ids) + cell.max_tokens > most:
            raise UserError(
                f"question {question.id!r} of {cell.dataset}: expected at most {most - cell.max_tokens} tokens, as "
                f"{cell.target} reads {most} with the {cell.max_tokens} to come, got {len(ids)} (ask for fewer tokens)"
            )
        return ids


def answer(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
    """Continue one prompt by draftproof's engine."""
    watch = Stopwatch(engine.target.device)
    (out,) = engine.generate([list(prompt_ids)], params)
    total, peak = watch.stop()
    stats, spent = out.stats, out.stats.seconds
    named = {part: getattr(spent, part) for part in ("draft", "target", "verify")}
    seconds = {**named, "other": max(total - sum(named.values()), 0.0), "total": total}
    parts = (out.drafter, out.stopper, out.verifier) if out.drafter != "none" else ("plain",)
    return Generation(
        token_ids=out.token_ids,
        text=out.text,
        finish_reason=out.finish_reason,
        method=", ".join(part for part in parts if part),
        tokens=stats.num_tokens,
        target_calls=stats.num_target_calls,
        rounds=stats.num_drafts,
        draft_tokens=stats.num_draft_tokens,
        accepted=stats.num_accepted_tokens,
        accepted_per_position=tuple(stats.num_accepted_tokens_per_pos),
        drafted_per_position=tuple(stats.num_drafts_per_pos),
        seconds=seconds,
        first_tokens=stats.num_first_tokens,
        first_seconds=stats.seconds_to_first,
        peak_memory=peak,
    )


class Stopwatch:
    """Wall-clock seconds and peak memory on a device, from its construction to `stop`; its work is waited for."""

    def __init__(self, device: torch.device) -> None:
        # On a CPU only the peak of the whole process is known, which includes the models of all cells.
        self._peak = Peak(device) if device.type == "cuda" else None
        self._start = time.perf_counter()

    def stop(self) -> tuple[float, int | None]:
        """Seconds, and bytes on the accelerator; None on a CPU."""
        peak = None if self._peak is None else self._peak.stop()
        return time.perf_counter() - self._start, peak
