"""Request: one request while it is decoded, and Output: its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Session
from draftproof.draft import Draft, Origin, Verdict
from draftproof.drafters.base import DraftRequest
from draftproof.engine.stats import Stats
from draftproof.errors import RequestError
from draftproof.finish import Cut, Cutter
from draftproof.reasoning import Reasoning
from draftproof.sampling import SHAPING, SamplingParams, TokenLogprob, Transforms, probabilities, top_logprobs
from draftproof.stoppers.budget import UNLIMITED, DraftBudget
from draftproof.verifiers.base import Verifier


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer.

    Attributes:
        text: text that no later token can change.
        token_ids: tokens committed in the round.
        finish_reason: None until the last chunk.
        output: the whole answer, in the last chunk.
        drafted: number of tokens that were drafted for the round.
        accepted: how many of `token_ids`, from the first on, were drafted.
        origin: where the drafted tokens came from.
        reasoning: text of the model's reasoning, which is not in `text`.
        reasoning_tokens: how many of `token_ids`, from the first on, belong to the reasoning.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    output: Output | None = None
    drafted: int = 0
    accepted: int = 0
    origin: Origin = Origin.DRAFTER
    reasoning: str = ""
    reasoning_tokens: int = 0


class SameText(StrEnum):
    """Whether a request has the same text again, with its seed, in any batch and with any drafts."""

    YES = "yes"
    BUT_FOR_ROUNDING = "but for rounding"  # a token that wins by a hair may change
    BY_DRAFTS = "with the same drafts"  # draws belong to places in a round


# Fields of an Output that its JSON has in another form, or only where they were asked for.
_NOT_PLAIN = ("params", "stats", "logprobs", "prompt_logprobs", "reasoning", "reasoning_tokens")


@dataclass(frozen=True)
class Output:
    """One finished continuation.

    Attributes:
        prompt: the text, or None for a prompt of token ids.
        index: number of this continuation, of the n of the request.
        text: the generated text; empty without a tokenizer.
        token_ids: the generated tokens.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or token id that ended it; None for EOS and length.
        lossless: whether the output distribution is exactly the target's.
        same_bits: whether the target's logits are the same bits in every batch and draft, by construction
            (`Engine.rounding` says why not).
        same_text: whether the request has the same text again, with its seed, in any batch and with any drafts.
        drafter, stopper, verifier: the parts that were in effect.
        seed: of this request; the same seed gives the same draws.
        params: the sampling parameters in effect, including those of the checkpoint's generation config.
        logprobs: for each token, if requested.
        prompt_logprobs: for each token of the prompt, if requested; None for the first one.
        stats: counts, rates, times.
        reasoning: what the model reasoned before its answer to a chat, which is not in `text`; None where it cannot.
        reasoning_tokens: how many of `token_ids`, from the first on, belong to it.
    """

    prompt: str | None
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    lossless: bool
    same_bits: bool
    same_text: SameText
    drafter: str
    stopper: str | None
    verifier: str
    seed: int
    params: SamplingParams
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    reasoning: str | None = None
    reasoning_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        made = {name: value for name, value in vars(self).items() if name not in _NOT_PLAIN}
        made |= {"token_ids": list(self.token_ids), "same_text": str(self.same_text)}
        made["sampling"] = {name: getattr(self.params, name) for name in SHAPING}
        made["stats"] = self.stats.to_dict()
        if self.reasoning is not None:
            made |= {"reasoning": self.reasoning, "reasoning_tokens": self.reasoning_tokens}
        if self.logprobs is not None:
            made["logprobs"] = [entry.to_dict() for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            made["prompt_logprobs"] = [None if entry is None else entry.to_dict() for entry in self.prompt_logprobs]
        return made


@dataclass(eq=False)
class Request:
    """A request while it waits or is decoded."""

    id: int  # identifies it, also to the drafter
    prompt: str | None  # its text, or None for a prompt of token ids
    index: int  # number of the continuation, of the n of the prompt
    tokens: list[int]  # prompt and committed tokens
    prompt_length: int  # number of prompt tokens
    seed: int  # of all its draws
    transforms: Transforms  # its sampling parameters, bound to the target's vocabulary
    cutter: Cutter  # cuts the tokens of a round at the request's end
    max_tokens: int  # tokens that it may emit
    rule: Verifier  # verifies its drafts
    session: Session | None = None  # the target's session; None before the request runs and after it ends
    round: int = 0  # number of finished rounds; part of the key of every draw
    verifier_state: object = None  # the rule's state, passed to it with the next draft; None for rules without state
    stats: Stats = field(default_factory=Stats)
    chunks: deque[Chunk] = field(default_factory=deque)  # committed pieces that a stream has not taken yet
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: RequestError | None = None  # why it failed, or None
    prediction: tuple[int, ...] = ()  # tokens that the answer may repeat
    offline: bool = False  # whether nobody waits for each token, so that it may wait while prompts of others are read
    reading: bool = True  # whether its prompt is still to be read, or read again
    # Of the prompt's tokens after the first one, as far as they are read; one list for all continuations of the prompt.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    # The continuations of the prompt that have not ended, in order: the first one takes in the log-probabilities of the
    # prompt for all.
    siblings: list[Request] = field(default_factory=list, repr=False)
    reused: int = 0  # tokens that were taken over from other requests instead of being read
    speculates: bool = True  # whether anything is drafted for it
    cache_salt: str = ""  # what was read or written for it is used for requests with the same salt only
    share_text: bool = True  # whether such requests may draft from its tokens, and it from theirs
    reasoning: Reasoning | None = None  # how its output begins; None where all of it is the answer

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.transforms.params

    @property
    def finished(self) -> bool:
        """Whether its last token is committed, or it failed."""
        return self.error is not None or self.cutter.finish is not None

    @property
    def output_ids(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def place(self) -> int:
        """Number of the output token that comes next, from 0; the key of draws with shared noise."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.max_tokens - self.place

    @property
    def unscored(self) -> bool:
        """Whether it has to take in log-probabilities of the prompt."""
        return self._lacks_scores and not self._second

    @property
    def awaits_scores(self) -> bool:
        """Whether another continuation takes in the log-probabilities of the prompt now."""
        return self._lacks_scores and self._second

    @property
    def _lacks_scores(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def _second(self) -> bool:
        return bool(self.siblings) and self.siblings[0] is not self

    def leave(self) -> None:
        """It has ended: another continuation goes on with what it did for all."""
        if self in self.siblings:
            self.siblings.remove(self)

    def score(self, logits: Float[Tensor, "rows vocab"], first: int) -> None:
        """Take in the logits after the tokens of the prompt from place `first` on."""
        assert self.params.prompt_logprobs is not None, "only prompts whose log-probabilities are wanted"
        known = len(self.prompt_logprobs) - first  # not 0 where a prompt is read a second time
        tokens = self.tokens[first + 1 : first + 1 + logits.shape[0]]
        if known < len(tokens):
            self.prompt_logprobs += top_logprobs(logits[known:], tokens[known:], self.params.prompt_logprobs)

    def draft_request(self, limit: int, budget: DraftBudget = UNLIMITED) -> DraftRequest:
        """The part of the request that the drafter gets."""
        return DraftRequest(
            self.id,
            self.tokens,
            self.prompt_length,
            limit,
            self.transforms,
            self.session,
            self.prediction,
            self.cache_salt,
            self.share_text,
            budget,
        )

    def contexts(self, draft: Draft) -> tuple[list[int], Sequence[Sequence[int]]]:
        """Output tokens, and the drafted path above each row of logits; empty if no transform reads them."""
        if not self.transforms.path_dependent:
            return [], ()
        ids = draft.tree.ids
        return self.output_ids, [(), *[[ids[node] for node in path] for path in draft.tree.paths]]

    def _reported(
        self, draft: Draft, above: Sequence[int], logits: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "kept vocab"]:
        """The rows whose log-probabilities are reported, for the tokens below the rows `above`."""
        rows = logits[list(above)]
        if self.params.logprobs_mode == "raw_logprobs":
            return rows
        outputs, paths = self.contexts(draft)
        return probabilities(rows, self.transforms, outputs, [paths[row] for row in above] if paths else ()).log()

    def commit(self, draft: Draft, verdict: Verdict, logits: Float[Tensor, "rows vocab"]) -> Cut:
        """Cut a verdict at the request's end, and add tokens, text, statistics and log-probabilities.

        The session is not changed: the next round's `unread` keeps the accepted path and drops the rest.
        """
        cut = self.cutter.cut(verdict.emitted)
        kept = verdict.emitted[: cut.kept]
        accepted = verdict.path[: cut.kept]
        if self.params.logprobs is not None:
            above = [0, *[node + 1 for node in verdict.path]][: len(kept)]
            rows = self._reported(draft, above, logits)
            self.logprobs += top_logprobs(rows, kept, self.params.logprobs)
        self.tokens.extend(kept)
        self.reading = False
        self.round += 1
        self.verifier_state = verdict.state
        depth = max(draft.tree.depths, default=0)
        self.stats.record(drafted=len(draft), depth=depth, accepted=len(accepted), emitted=len(kept))
        if draft.origin is Origin.PREDICTION:
            self.stats.num_accepted_prediction_tokens += len(accepted)
        return cut
