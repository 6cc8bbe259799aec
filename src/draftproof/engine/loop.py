"""The only decode loop: draft, verify, commit, for every drafter, stopper, rule and batch size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Backend, Feed, FeedOutput, own_threads, unread
from draftproof.backends.cache.passes import PREFILL_CHUNK
from draftproof.draft import Draft, Verdict
from draftproof.drafters.base import Drafter, PreparedDrafter, SessionDrafter
from draftproof.engine.composition import unbounded_reason
from draftproof.engine.intake import UNBOUNDED, RequestIntake
from draftproof.engine.memory import MemoryUse, read_bytes
from draftproof.engine.prompts import Prompt, as_prompts, one_for_each
from draftproof.engine.request import Chunk, Output, Request
from draftproof.engine.scheduler import NoSessions, Plan, PrefillChunk, Scheduler
from draftproof.engine.stats import Seconds
from draftproof.engine.threads import SmallProducts, ThreadCount, interruptions, release_team
from draftproof.errors import RequestError, UserError, blamed_on
from draftproof.finish import Finish
from draftproof.native.threads import limit_threads
from draftproof.rng import CounterRoundRng, NoiseRoundRng, Purpose, RoundRng, SplitRoundRng
from draftproof.sampling import LogitsCheck, SamplingParams, probabilities
from draftproof.stoppers.base import RoundTime
from draftproof.stoppers.budget import DraftBudget
from draftproof.verifiers.base import Verifier

RoundRngFactory = Callable[[Sequence[int], Sequence[int]], RoundRng]


class DecodingLoop(RequestIntake):
    """Generates from a target model, speculatively if it has a drafter.

    Two threads may share a loop: `add`, `step` and `abort` hold its lock, and their requests run in the same rounds.

    Args:
        target: the model that defines the output distribution.
        drafter: makes the drafts; default none (plain decoding).
        verifier: the verification rule; default block verification.
        tokenizer: a transformers tokenizer; without one, prompts are token ids and outputs have no text.
        eos_token_ids: tokens that end a text.
        max_batch: requests decoded together; further ones wait.
        default_params: sampling parameters of requests without their own.
        kv_memory: bytes for keys, values and states of all requests, or a text such as "2GiB"; further requests wait,
            and one that can never fit is refused. None: no limit.
        prefix_reuse: whether to reuse the keys and values of another request, running or finished, with the same
            prefix.
        seeded_verifier: the rule of requests that sample with their own seed; default `verifier`.
        draft_budget: the most drafted tokens of a round, over all its requests; None for no limit. Before each token
            is drawn, the likeliest to be accepted are chosen.
        round_rng: makes a round's randomness from the rows' seeds and round numbers, or for a rule with shared noise
            from the rows' seeds and positions; default what the rule needs. Tests pass an EnumeratingRng.

    Raises:
        UserError: drafter and verifier do not fit together, the target cannot do what they need, or `kv_memory` is too
            small.
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
        kv_memory: int | str | None = None,
        prefix_reuse: bool = True,
        default_params: SamplingParams | None = None,
        round_rng: RoundRngFactory | None = None,
        seeded_verifier: Verifier | None = None,
        draft_budget: int | None = None,
    ) -> None:
        super().__init__(
            target,
            drafter,
            verifier,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            default_params=default_params,
            seeded_verifier=seeded_verifier,
        )
        if max_batch < 1:
            raise UserError(f"max_batch: expected 1 or more, got {max_batch}")
        self.max_batch = max_batch
        self._budget = DraftBudget(draft_budget)
        if draft_budget is not None and (why := unbounded_reason(self.drafter, self.verifier)):
            raise UserError(why)
        self._round_rng = round_rng
        self._checks = LogitsCheck()
        limit_threads()
        counted = interruptions() if target.device.type == "cpu" else None
        own = own_threads(target)  # which let others run while they wait, so that all may be tried at any time
        self._threads = ThreadCount(counted, held_up=None if own else SmallProducts().held_up, own=own)
        self._kv_memory = read_bytes(kv_memory)
        self._prefix_reuse = prefix_reuse
        self._schedule()
        release_team()  # models were probed in this thread, but rounds may run in another one

    def _schedule(self) -> None:
        """Start with an empty queue and an empty cache for the current target and drafter."""
        self._sessions = self.drafter if isinstance(self.drafter, SessionDrafter) else NoSessions()
        self.scheduler = Scheduler(
            self.target,
            self._sessions,
            max_batch=lambda: self.max_batch,
            spare=lambda: self.drafter.limit + 1,
            kv_memory=self._kv_memory,
            prefix_reuse=self._prefix_reuse,
        )

    def abort(self, request: Request) -> None:
        """Stop a request and release its memory; has no effect on a finished request."""
        with self._lock:
            if request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)
                request.leave()
            if request in self.scheduler.running:
                self._retire(request)

    def _retire(self, request: Request) -> None:
        request.leave()
        self.scheduler.end(request, reusable=request.error is None)
        self.drafter.release(request.id)
        self._budget.release(request.id)
        request.verifier_state = None  # callers may keep requests for long
        if not self.busy:
            self.idle()

    def forget(self) -> None:
        """Clear the prefix cache; later requests read their whole prompts."""
        with self._lock:
            self.scheduler.prefix_cache.clear()

    def idle(self) -> None:
        """Hook for subclasses: called when the last request has ended."""

    @torch.inference_mode()
    def prepare(self, seconds: float = math.inf) -> bool:
        """Build what drafting needs in advance; otherwise it is built between the rounds of the first requests.

        Args:
            seconds: time limit for starting another step. At least one step runs; a step takes as long as rounding the
                weights of one layer, or reading a few tokens.

        Returns:
            Whether everything is built.
        """
        with self._lock, self._threads.set():
            return not isinstance(self.drafter, PreparedDrafter) or self.drafter.prepare(seconds)

    def waits(self, request: Request) -> bool:
        """Whether a request is waiting for a place in the batch."""
        with self._lock:
            return request in self.scheduler.waiting

    # --- the loop -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def memory(self) -> MemoryUse:
        """Current memory of keys, values and states, and the number of reused tokens."""
        with self._lock:
            return self.scheduler.use

    @torch.inference_mode()
    def step(self) -> None:
        """Run one round: draft, verify and commit for the requests in decoding, and read prompt chunks of others.

        A round emits no tokens if it only reads chunks of long prompts.

        If a request fails (NaN logits, a transform that raises), the round is repeated without it, with the same
        draws for the others. If anything else raises, no token of the round is committed, and the next round rolls
        every session back to its committed tokens.
        """
        with self._lock:
            for stopped in self.scheduler.admit():
                self.drafter.release(stopped.id)
            while self.scheduler.running:
                start, plan = time.perf_counter(), self.scheduler.plan()
                before = sum(row.place for row in plan.rows)
                try:
                    with self._threads.set():
                        self._round(plan, start)
                except RequestError as error:
                    self._fail(error)
                else:
                    if not plan.reads:
                        seconds = time.perf_counter() - start
                        self._threads.record_time(seconds, sum(row.place for row in plan.rows) - before)
                    return

    def _round(self, plan: Plan, start: float) -> None:
        rows, seconds = plan.rows, Seconds()
        rng = self._rng(rows)
        with seconds.measure("draft"):
            self._budget.begin()
            requests = [row.draft_request(self._draft_limit(row), self._budget) for row in rows]
            proposed = self.drafter.propose(requests, rng) if rows else []
            legal = [_legal_part(*each).to(self.target.device) for each in zip(rows, proposed, strict=True)]
            drafts = self._budget.cut([row.id for row in rows], legal)
        drafting = seconds.draft
        with seconds.measure("target"):
            feeds = [self._feed(row, draft) for row, draft in zip(rows, drafts, strict=True)]
            feeds += [chunk.feed(self.target.device) for chunk in plan.chunks]
            outputs = self.target.forward(feeds)
        if plan.chunks:
            self._end(plan.chunks, outputs[len(rows) :])
            with seconds.measure("draft"):
                self._sessions.read([chunk.draft_request() for chunk in plan.chunks])
        if rows:
            self._decide(rows, drafts, outputs[: len(rows)], rng, seconds)
        seconds.total = time.perf_counter() - start
        self.scheduler.record_time(plan, seconds.total - drafting, sum(map(len, drafts)), drafting)
        for row in [*rows, *(chunk.row for chunk in plan.chunks)]:
            row.stats.add_time(seconds)
        if rows:
            self.drafter.spent(
                RoundTime(
                    draft=seconds.draft,
                    rest=seconds.total - seconds.draft,
                    rows=len(rows),
                    depth=max(draft.depth for draft in drafts),
                    nodes=sum(map(len, drafts)) / len(rows),
                    # The time of a round that read a chunk, however small, says nothing about other rounds.
                    reads=PREFILL_CHUNK if plan.chunks else max(len(feed.tokens) for feed in feeds),
                    prompt=sum(len(feed.tokens) for feed in feeds[: len(rows)])
                    - len(rows)
                    + sum(len(chunk.tokens) for chunk in plan.chunks),
                )
            )

    def _end(self, chunks: Sequence[PrefillChunk], outputs: Sequence[FeedOutput]) -> None:
        """Pass the logits of scored chunks to their requests."""
        scored = [(part, each.logits) for part, each in zip(chunks, outputs, strict=True) if part.scored]
        for part, logits in scored:
            self._checks.add(part.row.id, logits, f"the target ({self.target.name})")
        self._checks.finish()
        for part, logits in scored:
            part.end(logits)

    def _decide(
        self,
        rows: Sequence[Request],
        drafts: Sequence[Draft],
        outputs: Sequence[FeedOutput],
        rng: RoundRng,
        seconds: Seconds,
    ) -> None:
        """Verify and commit."""
        with seconds.measure("verify"):
            try:
                target_probs = [self._target_probs(*row) for row in zip(rows, drafts, outputs, strict=True)]
                verdicts = self._verdicts(rows, drafts, target_probs, rng)
            finally:  # after the rule, whose own copy already waited for the device; this check explains its errors
                self._checks.finish()
        for each in zip(rows, drafts, outputs, verdicts, strict=True):
            self._commit(*each)

    def _rng(self, rows: Sequence[Request]) -> RoundRng:
        """The randomness of a round: keyed by position for requests whose rule shares noise, else by round number."""
        numbers = [row.place if row.rule.shared_noise else row.round for row in rows]
        if self._round_rng is not None:
            return self._round_rng([row.seed for row in rows], numbers)
        parts = []
        for kind, made in ((False, CounterRoundRng), (True, NoiseRoundRng)):
            own = [place for place, row in enumerate(rows) if row.rule.shared_noise is kind]
            if own:
                parts.append((own, made([rows[place].seed for place in own], [numbers[place] for place in own])))
        return parts[0][1] if len(parts) == 1 else SplitRoundRng(parts)

    @staticmethod
    def _verdicts(
        rows: Sequence[Request], drafts: Sequence[Draft], probs: Sequence[Float[Tensor, "_ vocab"]], rng: RoundRng
    ) -> list[Verdict]:
        """The verdict of each request by its own rule; requests with the same rule are verified together."""
        found: dict[int, Verdict] = {}
        for rule in {id(row.rule): row.rule for row in rows}.values():
            own = [place for place, row in enumerate(rows) if row.rule is rule]
            made = rule.verify(
                [drafts[place] for place in own],
                [probs[place] for place in own],
                rng.at(Purpose.VERIFY, rows=own),
                [rows[place].verifier_state for place in own],
            )
            found.update(zip(own, made, strict=True))
        return [found[place] for place in range(len(rows))]

    def _commit(self, row: Request, draft: Draft, output: FeedOutput, verdict: Verdict) -> None:
        self.drafter.observe(row.id, draft.depth, len(verdict.path))
        self._budget.observe(row.id, draft.depth, len(verdict.path))
        try:
            with blamed_on(row.id):
                cut = row.commit(draft, verdict, output.logits)
        except RequestError as error:  # the other requests are committed all the same
            self._fail(error)
            return
        if row.finished:
            self._retire(row)
        finish = row.cutter.finish
        row.chunks.append(
            Chunk(
                cut.text,
                verdict.emitted[: cut.kept],
                None if finish is None else str(finish),
                drafted=len(draft),
                accepted=min(len(verdict.path), cut.kept),
                origin=draft.origin,
                reasoning=cut.reasoning,
                reasoning_tokens=cut.reasoning_tokens,
            )
        )

    def _fail(self, error: RequestError) -> None:
        """End one request with an error."""
        row = next(row for row in self.scheduler.running if row.id == error.request_id)
        row.error = error
        self._retire(row)
        row.chunks.append(Chunk("", (), str(Finish.ERROR)))

    def _draft_limit(self, row: Request) -> int:
        """Longest useful draft; one place is left for the bonus token. Drafts of constant length are cut at commit."""
        if not row.speculates:
            return 0
        left = UNBOUNDED if self.target.max_positions is None else self.target.max_positions - len(row.tokens)
        return left if row.rule.constant_length else min(left, max(row.remaining - 1, 0))

    @staticmethod
    def _feed(row: Request, draft: Draft) -> Feed:
        assert row.session is not None, "running requests have a session"
        return Feed(row.session, unread(row.session, row.tokens), draft.tree if len(draft) else None)

    def _target_probs(self, row: Request, draft: Draft, output: FeedOutput) -> Float[Tensor, "rows vocab"]:
        self._checks.add(row.id, output.logits, f"the target ({self.target.name})")
        with blamed_on(row.id):
            outputs, paths = row.contexts(draft)
            return probabilities(output.logits, row.transforms, outputs, paths)

    # --- whole generations ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        predictions: str | Sequence[str | Sequence[int] | None] | None = None,
        cache_salt: str = "",
    ) -> list[Output]:
        """Continue every prompt; returns when all are finished.

        Args:
            prompts: one prompt or several; a prompt is a text, token ids (a list, or an array of one dimension) or chat
                messages.
            params: sampling parameters for all prompts, or one object for each; default `default_params`.
            predictions: a text for all prompts, or a text, token ids or None for each; see `add`.
            cache_salt: for all prompts; see `add`.

        Returns:
            The n continuations of each prompt, in order.

        Raises:
            UserError: an invalid prompt or invalid parameters; then nothing is decoded.
            RequestError: a request failed; the error's `outputs` has all outputs, with None for failed requests.
        """
        many = as_prompts(prompts)
        each = one_for_each("params", params, SamplingParams, len(many))
        texts = one_for_each("predictions", predictions, str, len(many))
        requests: list[Request] = []
        try:
            for prompt, own, text in zip(many, each, texts, strict=True):
                requests.extend(self.add(prompt, own, prediction=text, offline=True, cache_salt=cache_salt))
            while not all(request.finished for request in requests):
                self.step()
        finally:  # also where `add` refused a later prompt, or the user interrupted
            for request in requests:
                self.abort(request)
            release_team()
        failed = next((request.error for request in requests if request.error is not None), None)
        if failed is not None:
            failed.outputs = tuple(None if request.error else self.output(request) for request in requests)
            raise failed
        return [self.output(request) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: str | Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> Iterator[Chunk]:
        """Continue one prompt, and yield each round's text when it is committed; the last chunk has the Output.

        Raises:
            UserError: as in `generate`; also for n > 1.
            RequestError: the request failed.
        """
        params = self._sampling(params)
        if params.n != 1:
            raise UserError(f"n: expected 1, since a stream has one continuation, got {params.n} (use generate)")
        (request,) = self.add(prompt, params, prediction=prediction, cache_salt=cache_salt)
        try:
            while not request.finished or request.chunks:
                if not request.chunks:
                    self.step()
                while request.chunks:
                    chunk = request.chunks.popleft()
                    last = request.finished and not request.chunks
                    yield replace(chunk, output=self.output(request) if last else None)
        finally:
            self.abort(request)
            release_team()


def _legal_part(row: Request, draft: Draft) -> Draft:
    """A chain cut before the first point mass that the request's grammar forbids.

    Forbidden tokens have probability 0: a lossless rule would reject them, but a lossy one could accept them. Only
    tokens that are a function of the prefix may be dropped after looking at them. Drawn tokens go to the rule as they
    are: ending a chain because of a drawn token would bias the distribution.
    """
    constraint = row.transforms.constraint
    if constraint is None or not draft.tree.is_chain or row.rule.constant_length:
        return draft
    with blamed_on(row.id):
        for size, token in enumerate(draft.tree.ids[draft.drawn :], draft.drawn):
            if not constraint.allowed(row.output_ids, [draft.tree.ids[:size]])[0, token]:
                return draft.first(size)
    return draft
