"""Request intake: requests are checked before they are queued for the loop; and the Output of a finished request."""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from draftproof.backends.base import Backend, rounding, why_bounded
from draftproof.drafters.base import Drafter
from draftproof.drafters.none import NoDrafter
from draftproof.engine.composition import DrafterTraits, VerifierTraits, incompatible_reason, no_rollback_reason
from draftproof.engine.prompts import Prompt, PromptReader, is_chat
from draftproof.engine.request import Output, Request, SameText
from draftproof.engine.scheduler import Scheduler
from draftproof.errors import ContextError, UserError
from draftproof.finish import Cutter
from draftproof.grammar import Grammars
from draftproof.reasoning import Reasoning, ReasoningConstraint
from draftproof.rng import fold
from draftproof.sampling import Constraint, SamplingParams
from draftproof.verifiers.base import Verifier
from draftproof.verifiers.chain import block_verifier

UNBOUNDED = 1 << 30  # tokens, if nothing limits a text


class RequestIntake:
    """Checks and queues requests for a target, a drafter and a rule; takes the arguments of `DecodingLoop`."""

    scheduler: Scheduler  # where requests wait; the loop makes it

    def __init__(
        self,
        target: Backend,
        drafter: Drafter | None,
        verifier: Verifier | None,
        *,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        default_params: SamplingParams | None,
        seeded_verifier: Verifier | None,
    ) -> None:
        self.target = target
        self.drafter = NoDrafter() if drafter is None else drafter
        self.verifier = block_verifier() if verifier is None else verifier
        self.seeded_verifier = seeded_verifier
        self.eos_token_ids = tuple(eos_token_ids)
        self.default_params = default_params or SamplingParams()
        self.prompts = PromptReader(tokenizer, target.name)
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._refuse_impossible()

    def _refuse_impossible(self) -> None:
        for rule in filter(None, (self.verifier, self.seeded_verifier)):
            if why := incompatible_reason(DrafterTraits.of(self.drafter), VerifierTraits.of(rule)):
                raise UserError(why)
        if self.drafter.limit and self.plain_because:
            raise UserError(
                f"drafter {self.drafter.name} cannot be used, because {self.plain_because}: use drafter none"
            )
        if self.drafter.branching and not self.target.capabilities.trees:
            raise UserError(
                f"drafter {self.drafter.name} drafts trees, but {self.target.name} cannot read them: use "
                "a drafter of single chains (model, ngram, suffix)"
            )

    @property
    def plain_because(self) -> str:
        """Why the target can only be decoded without drafts; empty if it can be drafted for."""
        return no_rollback_reason(self.target)

    @property
    def rounding(self) -> str:
        """Why the last digits of logits may depend on the batch and the drafts; empty if they cannot."""
        why = rounding(self.target)
        if not why and self.drafter.branching:
            return f"drafter {self.drafter.name} drafts trees, whose sums have another order than those of a chain"
        return why

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.prompts.tokenizer

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The compiler for grammars of requests; raises UserError if this model cannot use grammars."""
        return Grammars.of(self.tokenizer, self.target.vocab_size, self.eos_token_ids)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt: a text, token ids, or chat messages (needs a chat template).

        Raises:
            UserError: the prompt is empty or not a prompt, or it is a text and there is no tokenizer.
        """
        return self.prompts.read(prompt)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: str | Sequence[int] | None = None,
        offline: bool = False,
        speculates: bool = True,
        cache_salt: str = "",
        share_text: bool = True,
        constraint: Constraint | None = None,
        reasoning: Reasoning | None = None,
        patient: bool | None = None,
    ) -> list[Request]:
        """Queue a prompt; it runs as soon as there is a free place in the batch.

        Args:
            prompt: a text, token ids or chat messages.
            params: sampling parameters; default `default_params`.
            prediction: a text or token ids that much of the answer may repeat. Drafts are taken from it; the output
                distribution does not change.
            offline: whether the request may pause while the prompts of others are read, because nobody reads its
                tokens as they come. If an interactive request is running, prompts are read in chunks, so that a
                round takes less than twice its usual time.
            speculates: False for plain decoding of this request.
            cache_salt: cached data of the request is reused only by requests with the same salt, so that clients with
                different salts learn nothing of each other from the time or the drafts of an answer.
            share_text: whether drafters that look up tokens in other requests may use this request's tokens, and
                other requests' tokens for this one.
            constraint: the compiled grammar of `params`, if it was compiled before.
            reasoning: how the output begins, if the prompt is the token ids of a chat; for messages it is found here.
            patient: the old name of `offline`, for one more version.

        Returns:
            `params.n` requests; each collects chunks until it is `finished`.

        Raises:
            UserError: the prompt is empty, too long or not a prompt, or the drafter cannot use a prediction.
        """
        if patient is not None:
            warnings.warn("add: patient is now called offline", DeprecationWarning, stacklevel=2)
            offline = patient
        params = self._sampling(params)
        text, ids = self.encode(prompt)
        predicted = self._prediction_ids(prediction)
        self._check_prompt(ids, params, speculates=speculates)
        if reasoning is None and is_chat(prompt):
            reasoning = self.prompts.reasoning(ids)
        made = self._continuations(text, ids, params, constraint, reasoning)
        for request in made:
            request.prediction = predicted
            request.offline = offline
            request.speculates = speculates
            request.cache_salt = cache_salt
            request.share_text = share_text
        with self._lock:
            self.scheduler.waiting.extend(made)
        return made

    def _continuations(
        self,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        constraint: Constraint | None,
        reasoning: Reasoning | None,
    ) -> list[Request]:
        """The requests for one prompt, each with its own random draws."""
        left = self.context_left(len(ids))
        limit = self._fitting_limit(
            len(ids), left if params.max_tokens is None else min(params.max_tokens, left), params
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        transforms = params.bind(
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            prompt_ids=ids,
            bad_words=self.prompts.bad_words(params.bad_words),
            constraint=self._constraint(params, constraint, reasoning, ids),
        )
        made = [
            Request(
                id=next(self._ids),
                prompt=text,
                index=index,
                tokens=list(ids),
                prompt_length=len(ids),
                seed=seed if index == 0 else fold(seed, index) >> 1,
                transforms=transforms.fresh(),
                cutter=Cutter(params, self.eos_token_ids, self.tokenizer, context_left=left, reasoning=reasoning),
                max_tokens=limit,
                rule=self._rule(params),
                reasoning=reasoning,
            )
            for index in range(params.n)
        ]
        if params.prompt_logprobs is not None:
            scores, siblings = made[0].prompt_logprobs, list(made)
            for request in made:
                request.prompt_logprobs = scores
                request.siblings = siblings
        return made

    def _constraint(
        self, params: SamplingParams, compiled: Constraint | None, reasoning: Reasoning | None, ids: Sequence[int]
    ) -> Constraint | None:
        """The constraint on the output: the grammar of the answer, and the token limit of the reasoning before it.

        The limit applies to any prompt; reasoning is split off only in answers to chats.
        """
        answer = None if params.grammar is None else compiled or self.grammars.constraint(params.grammar)
        if params.thinking_token_budget is not None:
            reasoning = reasoning or self.prompts.reasoning(ids)
        if reasoning is None or (answer is None and params.thinking_token_budget is None):
            return answer
        return ReasoningConstraint(
            reasoning, self.target.vocab_size, params.thinking_token_budget, answer, self.eos_token_ids
        )

    def _fitting_limit(self, length: int, limit: int, params: SamplingParams) -> int:
        """Tokens that a request may emit with the available memory; an explicit `max_tokens` must fit as a whole."""
        longest = self.scheduler.budget.longest
        if longest is None or length + limit <= longest:
            return limit
        if params.max_tokens is None and length < longest:
            return longest - length
        least = length + (1 if params.max_tokens is None else limit)
        raise ContextError(self.scheduler.budget.refusal(least, "the request"))

    def _prediction_ids(self, prediction: str | Sequence[int] | None) -> tuple[int, ...]:
        """The token ids of a prediction."""
        if prediction is None or (isinstance(prediction, str) and not prediction):
            return ()
        ids = (
            self.prompts.plain(prediction)
            if isinstance(prediction, str)
            else self.prompts.read(prediction, "prediction")[1]
        )
        if not ids:
            return ()
        if not self.drafter.reads_predictions:
            raise UserError(
                f"drafter {self.drafter.name} cannot use a prediction: leave it out, or use the drafter auto or suffix"
            )
        self._check_ids(ids, "prediction")
        return tuple(ids)

    def _sampling(self, params: SamplingParams | None) -> SamplingParams:
        """The sampling parameters of a request."""
        if params is None:
            return self.default_params
        if not isinstance(params, SamplingParams):
            raise UserError(
                f"params: expected SamplingParams, got {type(params).__name__} (make them with SamplingParams(...))"
            )
        return params

    def context_left(self, length: int) -> int:
        """Tokens that fit after a prompt; a rule of constant length needs space for a whole draft at the end."""
        bounds = [self.target.max_positions]
        if self.verifier.constant_length:
            bounds.append(self.drafter.max_positions)
        most = min((bound for bound in bounds if bound is not None), default=UNBOUNDED)
        return most - length - (self.drafter.limit if self.verifier.constant_length else 0)

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self.target.vocab_size):  # much faster than a loop
            return
        for place, token in enumerate(ids):
            if not 0 <= token < self.target.vocab_size:
                raise UserError(f"token {place} of the {what} is {token}: expected 0 to {self.target.vocab_size - 1}")

    def _check_prompt(self, ids: list[int], params: SamplingParams, *, speculates: bool) -> None:
        if params.prompt_logprobs is not None and self.plain_because:
            raise UserError(f"prompt_logprobs is not supported with this target: {self.plain_because}")
        if not speculates and self.verifier.constant_length:
            raise UserError(
                f"verifier {self.verifier.name} needs drafts in every request: leave speculates=False out, or use "
                "another verifier"
            )
        if not ids:
            raise UserError("the prompt is empty: a request needs at least one token")
        self._check_ids(ids, "prompt")
        if self.context_left(len(ids)) < 1:
            longest = len(ids) + self.context_left(len(ids)) - 1
            reason = why_bounded(self.target)
            raise ContextError(
                f"prompt: expected 1 to {longest} tokens, by the context of {self.target.name}, got {len(ids)}"
                + (f" ({reason})" if reason else "")
            )

    def _rule(self, params: SamplingParams) -> Verifier:
        """The rule of a request: `seeded_verifier` if it samples with its own seed, else `verifier`."""
        seeded = params.seed is not None and params.temperature > 0
        return (self.seeded_verifier if seeded else None) or self.verifier

    def _same_text(self, request: Request) -> SameText:
        """Whether a repeated request gives the same text, whatever is drafted and whatever shares its batch."""
        rule, sampled = request.rule, request.params.temperature > 0
        if self.drafter.limit and not rule.shared_noise and (sampled or not rule.lossless):
            return SameText.BY_DRAFTS
        return SameText.BUT_FOR_ROUNDING if self.rounding else SameText.YES

    def output(self, request: Request) -> Output:
        """The Output of a finished request.

        Raises:
            RequestError: the request failed.
        """
        assert request.finished, "only finished requests have an output"
        if request.error is not None:
            raise request.error
        stopper = self.drafter.stopper
        return Output(
            prompt=request.prompt,
            index=request.index,
            text=request.cutter.text,
            token_ids=tuple(request.output_ids),
            finish_reason=str(request.cutter.finish),
            stop_reason=request.cutter.stop_reason,
            lossless=request.rule.lossless,
            same_bits=not self.rounding,
            same_text=self._same_text(request),
            drafter=self.drafter.name,
            stopper=None if stopper is None else stopper.name,
            verifier=request.rule.name,
            seed=request.seed,
            params=request.params,
            stats=request.stats,
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            prompt_logprobs=None if request.params.prompt_logprobs is None else (None, *request.prompt_logprobs),
            reasoning=None if request.reasoning is None else request.cutter.reasoning,
            reasoning_tokens=request.cutter.reasoning_tokens,
        )
