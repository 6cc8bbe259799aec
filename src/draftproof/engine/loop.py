"""The one decode loop: draft, verify, commit - for every drafter, stopper, rule and batch size.

Knows: the order of a round and who runs in it. Does not know: how drafts are made or verified, how models compute,
what the parts are called.
"""

from __future__ import annotations

import itertools
import numbers
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Backend, Feed, FeedOutput, unread
from draftproof.draft import Draft
from draftproof.drafters.base import Drafter
from draftproof.drafters.none import NoDrafter
from draftproof.engine.request import Chunk, Output, Request
from draftproof.engine.stats import Seconds
from draftproof.errors import UserError, reason
from draftproof.finish import Cutter
from draftproof.rng import CounterRoundRng, Purpose, RoundRng, fold
from draftproof.sampling import SamplingParams, check_logits, probabilities
from draftproof.verifiers.base import Verifier
from draftproof.verifiers.chain import block_verifier

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
RoundRngFactory = Callable[[Sequence[int], Sequence[int]], RoundRng]
_UNBOUNDED = 1 << 30


class DecodingLoop:
    """Generates from a target model, speculatively when it is given a drafter.

    Args:
        target: the model whose law the output has.
        drafter: where drafts come from; default none (plain decoding).
        verifier: the rule; default block verification.
        tokenizer: a transformers tokenizer; without one, prompts are token ids and there is no text.
        eos_token_ids: tokens that end a request.
        max_batch: requests decoded together; further ones wait.
        round_rng: makes a round's randomness from the rows' seeds and rounds; tests put an EnumeratingRng here.

    Raises:
        UserError: drafter and verifier do not fit together, or the target cannot do what they need.
    """

    def __init__(
        self,
        target: Backend,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        max_batch: int = 8,
        round_rng: RoundRngFactory = CounterRoundRng,
    ) -> None:
        self.target = target
        self.drafter = NoDrafter() if drafter is None else drafter
        self.verifier = block_verifier() if verifier is None else verifier
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_batch = max_batch
        self._round_rng = round_rng
        self._ids = itertools.count()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._refuse_impossible()

    def _refuse_impossible(self) -> None:
        drafter, verifier = self.drafter, self.verifier
        if drafter.branching and not verifier.branching:
            raise UserError(f"drafter {drafter.name} drafts trees, and rule {verifier.name} verifies chains only")
        if drafter.branching and not self.target.capabilities.trees:
            raise UserError(f"drafter {drafter.name} drafts trees, and {self.target.name} cannot read them")
        if drafter.point_masses and not verifier.point_masses:
            raise UserError(
                f"rule {verifier.name} needs the draft's probabilities, and drafter {drafter.name} has none"
            )
        if verifier.constant_length and not drafter.constant:
            raise UserError(
                f"rule {verifier.name} is exact for drafts of constant length only, and {drafter.name} varies"
            )
        if self.max_batch < 1:
            raise UserError(f"max_batch is {self.max_batch}: legal is 1 or more")

    # --- requests -------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt: a text, token ids, or chat messages (needs a chat template).

        Raises:
            UserError: nothing in it, token ids outside the vocabulary, or no tokenizer to read it with.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("the prompt is empty: give some text, or token ids to start from a special token")
            return prompt, [int(token) for token in self._tokenizer()(prompt)["input_ids"]]
        items = list(prompt)
        if items and isinstance(items[0], Mapping):
            text = self.chat_text(items)  # type: ignore[arg-type]
            return text, [int(token) for token in self._tokenizer()(text, add_special_tokens=False)["input_ids"]]
        for place, token in enumerate(items):
            if not isinstance(token, numbers.Integral):
                raise UserError(f"token {place} of the prompt is {token!r}: legal are whole numbers")
        return None, [int(token) for token in items]  # type: ignore[call-overload]

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The model's chat template applied to messages, ready for an answer.

        Raises:
            UserError: the tokenizer has no chat template, or the template refuses the messages.
        """
        tokenizer = self._tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"{self.target.name} has no chat template: give the prompt as plain text")
        try:
            return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
        except Exception as cause:
            raise UserError(f"the chat template of {self.target.name} refuses the messages: {reason(cause)}") from cause

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UserError("the engine has no tokenizer: give prompts as token ids")
        return self.tokenizer

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Request]:
        """Queue a request; it runs when `step` has room.

        Returns:
            Its `params.n` requests; each collects chunks, and is done when `finished`.

        Raises:
            UserError: a prompt that cannot be decoded from.
        """
        params = params or SamplingParams()
        text, ids = self.encode(prompt)
        self._check_prompt(ids)
        room = self._room(len(ids))
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        transforms = params.bind(
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            prompt_ids=ids,
            encode=None if self.tokenizer is None else self._encode_plain,
        )
        made = [
            Request(
                id=next(self._ids),
                prompt=text,
                index=index,
                tokens=list(ids),
                prompt_length=len(ids),
                seed=seed if index == 0 else fold(seed, index) >> 1,
                transforms=transforms,
                cutter=Cutter(params, self.eos_token_ids, self.tokenizer, room=room),
                max_tokens=limit,
            )
            for index in range(params.n)
        ]
        self._waiting.extend(made)
        return made

    def _room(self, length: int) -> int:
        """Tokens that fit after a prompt; a rule for constant drafts needs room for a whole one to the end."""
        bounds = [self.target.max_positions]
        if self.verifier.constant_length:
            bounds.append(self.drafter.max_positions)
        most = min((bound for bound in bounds if bound is not None), default=_UNBOUNDED)
        return most - length - (self.drafter.limit if self.verifier.constant_length else 0)

    def _encode_plain(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer()(text, add_special_tokens=False)["input_ids"]]

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise UserError("the prompt is empty: a request needs at least one token")
        for place, token in enumerate(ids):
            if not 0 <= token < self.target.vocab_size:
                raise UserError(
                    f"token {place} of the prompt is {token}: legal ids are 0 to {self.target.vocab_size - 1}"
                )
        if self._room(len(ids)) < 1:
            longest = len(ids) + self._room(len(ids)) - 1
            raise UserError(
                f"the prompt has {len(ids)} tokens: with the context of {self.target.name} legal are 1 to {longest}"
            )

    def abort(self, request: Request) -> None:
        """Drop a request and give back what it holds; finished ones are left alone."""
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._running:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        self._running.remove(request)
        self.drafter.release(request.id)
        request.verifier_state = None  # callers may hold requests for long
        if request.session is not None:
            request.session.close()
            request.session = None

    # --- the loop -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a call of `step` has something to do."""
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def step(self) -> None:
        """One round for every running request: draft, verify, commit.

        Should a part raise, no token of the round is committed; the next round rolls every session back to what is.
        """
        self._admit()
        rows = list(self._running)
        if not rows:
            return
        start, seconds = time.perf_counter(), Seconds()
        rng = self._round_rng([row.seed for row in rows], [row.round for row in rows])
        with seconds.measure("draft"):
            asked = [row.draft_request(self._draft_limit(row)) for row in rows]
            drafts = [draft.to(self.target.device) for draft in self.drafter.propose(asked, rng)]
        with seconds.measure("target"):
            outputs = self.target.forward([self._feed(row, draft) for row, draft in zip(rows, drafts, strict=True)])
        with seconds.measure("verify"):
            target_probs = [self._target_probs(*row) for row in zip(rows, drafts, outputs, strict=True)]
            states = [row.verifier_state for row in rows]
            verdicts = self.verifier.verify(drafts, target_probs, rng.at(Purpose.VERIFY), states)
        for row, draft, output, verdict in zip(rows, drafts, outputs, verdicts, strict=True):
            self.drafter.observe(row.id, draft.depth, len(verdict.path))
            cut = row.commit(draft, verdict, output.logits)
            if row.finished:
                self._retire(row)
            self._publish(row, cut.text, verdict.emitted[: cut.kept])
        seconds.total = time.perf_counter() - start
        for row in rows:
            row.stats.seconds.add(seconds)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_batch:
            request = self._waiting.popleft()
            request.session = self.target.open()
            self._running.append(request)

    def _draft_limit(self, row: Request) -> int:
        """Longest useful draft: the bonus token takes one place; rules of constant length are cut after the fact."""
        room = _UNBOUNDED if self.target.max_positions is None else self.target.max_positions - len(row.tokens)
        return room if self.verifier.constant_length else min(room, row.remaining - 1)

    @staticmethod
    def _feed(row: Request, draft: Draft) -> Feed:
        assert row.session is not None, "running requests have a session"
        return Feed(row.session, unread(row.session, row.tokens), draft.tree if len(draft) else None)

    def _target_probs(self, row: Request, draft: Draft, output: FeedOutput) -> Float[Tensor, "rows vocab"]:
        check_logits(output.logits, f"the target's ({self.target.name}) for request {row.id}")
        outputs, paths = row.contexts(draft)
        return probabilities(output.logits, row.transforms, outputs, paths)

    def _publish(self, row: Request, text: str, kept: tuple[int, ...]) -> None:
        reason = row.cutter.finish
        row.chunks.append(Chunk(text, kept, None if reason is None else str(reason)))

    # --- front doors ----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Continue every prompt; blocks until all are finished.

        Args:
            prompts: one prompt or several; a prompt is a text, token ids or chat messages.
            params: for all prompts, or one for each.

        Returns:
            For each prompt its n continuations, in order.

        Raises:
            UserError: a prompt or parameters that make no sense; nothing is decoded then.
        """
        many = as_prompts(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise UserError(f"{len(each)} SamplingParams for {len(many)} prompts: give one, or one for each")
        requests: list[Request] = []
        try:
            for prompt, own in zip(many, each, strict=True):
                requests.extend(self.add(prompt, own))
            while not all(request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        return [self.output(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continue one prompt and yield each round's text as it is committed; the last chunk carries the Output.

        Raises:
            UserError: as `generate`; also for n > 1, which has no single stream.
        """
        if params is not None and params.n != 1:
            raise UserError(f"n is {params.n}: a stream has one continuation; use generate")
        (request,) = self.add(prompt, params)
        try:
            while not request.finished or request.chunks:
                if not request.chunks:
                    self.step()
                while request.chunks:
                    chunk = request.chunks.popleft()
                    last = request.finished and not request.chunks
                    yield Chunk(
                        chunk.text, chunk.token_ids, chunk.finish_reason, self.output(request) if last else None
                    )
        finally:
            self.abort(request)

    def output(self, request: Request) -> Output:
        """The Output of a finished request."""
        assert request.finished, "only finished requests have an output"
        stopper = getattr(self.drafter, "stopper", None)
        return Output(
            prompt=request.prompt,
            index=request.index,
            text=request.cutter.text,
            token_ids=tuple(request.output_ids),
            finish_reason=str(request.cutter.finish),
            stop_reason=request.cutter.stop_reason,
            lossless=self.verifier.lossless,
            drafter=self.drafter.name,
            stopper=None if stopper is None else stopper.name,
            verifier=self.verifier.name,
            seed=request.seed,
            stats=request.stats,
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
        )


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a text, a list of token ids and a list of messages are one prompt.

    Raises:
        UserError: no prompt, or something that is none.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts is {prompts!r}: legal are a text, token ids, chat messages, or a list of those")
    items: list[Any] = list(prompts)
    if not items:
        raise UserError("no prompt given")
    if isinstance(items[0], int | Mapping):
        return [items]
    for item in items:
        if not isinstance(item, str | list | tuple):
            raise UserError(f"a prompt is {item!r}: legal are a text, token ids, or chat messages")
    return items
