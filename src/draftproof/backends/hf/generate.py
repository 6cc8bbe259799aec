"""Models that cannot be drafted for, decoded step by step by what transformers' own `generate` is made of.

Knows: nothing of what a model keeps between calls. So nothing can be taken back: a session that must forget a token
forgets everything, and reads what is left as a new prompt. Each row is read by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Capabilities, Feed, FeedOutput, unread
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.hf.probe import TOLERANCE
from draftproof.backends.model_info import ModelInfo, cache_names, relative_error
from draftproof.errors import UserError, reason

_PROMPT, _STEPS = 5, 4  # tokens of the check
_OF_GENERATE = {"synced_gpus", "streamer"}  # arguments of the loop, not of the model
_Step = tuple[Float[Tensor, " vocab"], dict[str, Any]]  # logits, and the arguments of the model's next call


@dataclass
class _CachedSequence:
    """The state of a sequence between two steps of transformers."""

    options: dict[str, Any]  # the arguments of the model's next call, with its cache
    length: int  # tokens that were read


class PlainSession(SlotSession):
    """A session that can only go on, or begin again."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__(cache)
        self.kept: _CachedSequence | None = None

    def reach(self, length: int) -> int:  # noqa: ARG002
        """0: nothing of it is of use for another request, which would read everything again."""
        return 0

    def _empty(self) -> None:
        """It cannot be copied."""

    def _reachable(self, length: int) -> int:
        if length == self.length:
            return length
        self.kept = None
        return 0

    def close(self) -> None:
        """Release what transformers keeps."""
        super().close()
        self.kept = None


class PlainBackend(SlotBackend):
    """A transformers causal LM that is decoded plainly, as its own `generate` does."""

    kind = "generate"

    def __init__(self, model: Any, *, name: str | None = None, check: bool = True, because: str = "") -> None:
        super().__init__(ModelInfo.loosely(model, name))
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.because = because or "backend generate was asked for"
        self.capabilities = Capabilities(trees=False, hidden=0, ragged=False, rollback=False, portions=False)
        self.embed = model.get_input_embeddings()
        self._latest: PlainSession | None = None
        self._keeps_one = False  # whether the model itself keeps states, which are those of the latest session
        if check:
            self._check_generation()

    def open(self) -> PlainSession:
        """A fresh session."""
        return PlainSession(self._cache)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed by itself: a prompt in one pass, then token by token.

        Raises:
            ValueError: nothing to read, longer than the model's context, drafts, or hidden states wanted.
        """
        if hidden:
            raise ValueError(f"{self.name} is decoded plainly: it gives no hidden states")
        with self._cache.lock:
            for feed in feeds:
                self._check(feed)
            return [FeedOutput(self._read(feed).unsqueeze(0)) for feed in feeds]

    def _check(self, feed: Feed) -> None:
        super()._check(feed)
        if feed.tree is not None and len(feed.tree):
            raise ValueError(f"{self.name} is decoded plainly: it reads no drafts")

    def _read(self, feed: Feed) -> Float[Tensor, " vocab"]:
        session = feed.session
        assert isinstance(session, PlainSession), "sessions were checked before"
        tokens = feed.tokens.tolist() if isinstance(feed.tokens, Tensor) else list(feed.tokens)
        kept, known = session.kept, session.length
        stale = self._keeps_one and self._latest is not session
        if known and (stale or kept is None or kept.length != known or len(tokens) > 1):
            tokens = [*session.tokens, *tokens]
            session.keep(known - 1)  # which forgets everything
            kept = None
        session.kept = self._latest = None  # a pass that fails leaves nothing behind
        ids = torch.tensor([[*(session.tokens if kept else []), *tokens]], device=self.device)
        row, options = self._first(ids) if kept is None else self._next(ids, kept.options)
        session.read(tokens)
        session.kept = _CachedSequence(options, session.length)
        self._latest = session
        return row

    def _first(self, ids: Int[Tensor, "1 tokens"]) -> _Step:
        options = self._prepared(ids)
        caches = (options.get(name) for name in cache_names() if name != "cache_params")
        width = ids.shape[1] if any(cache is not None for cache in caches) else None
        return self._call(ids, width, options, is_first_iteration=True)

    def _next(self, ids: Int[Tensor, "1 tokens"], options: dict[str, Any]) -> _Step:
        return self._call(ids, 1 if options.get("use_cache") else None, options)

    def _prepared(self, ids: Int[Tensor, "1 tokens"]) -> dict[str, Any]:
        """What `generate` passes to the model at first: a cache, a mask and more, as the model's class needs."""
        from transformers import GenerationConfig

        found: list[dict[str, Any]] = []

        def instead(
            _model: Any,
            input_ids: Tensor,
            logits_processor: Any = None,  # noqa: ARG001
            stopping_criteria: Any = None,  # noqa: ARG001
            generation_config: Any = None,  # noqa: ARG001
            **options: Any,
        ) -> Tensor:
            found.append(options)
            return input_ids

        kind: Any = GenerationConfig
        config = kind(max_new_tokens=1, do_sample=False, use_cache=True)
        mask = torch.ones_like(ids)
        self.model.generate(ids, attention_mask=mask, generation_config=config, custom_generate=instead)
        return {name: value for name, value in found[0].items() if name not in _OF_GENERATE}

    def _call(self, ids: Int[Tensor, "1 tokens"], width: int | None, options: dict[str, Any], **more: Any) -> _Step:
        model = self.model
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=width, **more, **options)
        out = model(**inputs, return_dict=True)
        options = model._update_model_kwargs_for_generation(out, options, is_encoder_decoder=False)  # noqa: SLF001
        return out.logits[0, -1].to(self.device), options

    # --- the check ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _check_generation(self) -> None:
        """Compare some rows with those of `model.generate`, before and after everything was forgotten."""
        from transformers import GenerationConfig

        ids = torch.linspace(1, self.vocab_size - 1, _PROMPT, device=self.device).long().tolist()
        kind: Any = GenerationConfig
        config = kind(max_new_tokens=_STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True)
        try:
            given = torch.tensor([ids], device=self.device)
            made = self.model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
            expected = torch.cat(made.logits)
            tokens: list[int] = made.sequences[0].tolist()
            rows = torch.stack(self._rows(tokens))[: len(expected)]
            if not self._differs(rows, expected):
                beside = torch.stack(self._rows(tokens, beside=True))[: len(expected)]
                self._keeps_one = self._differs(beside, expected)  # as in RecurrentGemma
        except Exception as cause:
            raise UserError(f"transformers cannot generate from {self.name} step by step: {reason(cause)}") from cause
        if not rows.isfinite().all():
            raise UserError(f"{self.name} computes logits that are not finite: try another dtype")
        if self._differs(rows, expected):
            error = relative_error(rows, expected)
            raise UserError(
                f"{self.name} does not reproduce what transformers generates (relative error {error:.2g}), so it is "
                "refused"
            )

    def _differs(self, rows: Float[Tensor, "tokens vocab"], expected: Float[Tensor, "tokens vocab"]) -> bool:
        return not relative_error(rows, expected) < TOLERANCE.get(self.dtype, TOLERANCE[torch.bfloat16])

    def _rows(self, tokens: list[int], *, beside: bool = False) -> list[Float[Tensor, " vocab"]]:
        """Rows after the prompt of the check and each token more; with `beside`, another session reads in turns."""
        session, other, rows = self.open(), self.open(), []
        try:
            self.forward([Feed(session, [*tokens[:_PROMPT], tokens[0]])])  # forgotten again by the next line
            for end in range(_PROMPT, len(tokens)):
                rows.append(self.forward([Feed(session, unread(session, tokens[:end]))])[0].logits[0])
                if beside:
                    self.forward([Feed(other, [tokens[0]])])
            return rows
        finally:
            session.close()
            other.close()

    # --- what it cannot do ----------------------------------------------------------------------------------------

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("rows of a plain backend are read one by one")

    def record_states(self, layers: Sequence[int] = ()) -> None:  # noqa: ARG002
        """Refused."""
        self._refuse()

    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:  # noqa: ARG002
        """Refused."""
        self._refuse()

    def first_layers(self, layers: int) -> SlotBackend:  # noqa: ARG002
        """Refused."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UserError(f"{self.name} cannot draft for itself, and is decoded plainly: {self.because}")
