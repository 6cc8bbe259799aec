"""Request: the state of a request while it is decoded. Output: its result."""

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
        text: final text, which no later token can change.
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
    """Whether the same seed gives the same text in any batch and with any drafts."""

    YES = "yes"
    BUT_FOR_ROUNDING = "but for rounding"  # a near tie may be decided otherwise
    BY_DRAFTS = "with the same drafts"  # random numbers are keyed by the place in a round


# Fields of an Output that its JSON has in another form, or only if they were requested.
_NOT_PLAIN = ("params", "stats", "logprobs", "prompt_logprobs", "reasoning", "reasoning_tokens")


@dataclass(frozen=True)
class Output:
    """One finished continuation.

    Attributes:
        prompt: the text, or None for a prompt of token ids.
        index: number of this continuation among the n of the request.
        text: the generated text; empty without a tokenizer.
        token_ids: the generated tokens.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or token id that ended it; None for EOS and length.
        lossless: whether the output distribution is exactly the target's.
        same_bits: whether the target's logits are bit-identical in every batch and draft, by construction
            (`Engine.rounding` says why not).
        same_text: whether the same seed gives the same text in any batch and with any drafts.
        drafter, stopper, verifier: the parts that were in effect.
        seed: of this request; the same seed gives the same draws.
        params: the sampling parameters in effect, including those of the checkpoint's generation config.
        logprobs: for each token, if requested.
        prompt_logprobs: for each token of the prompt, if requested; None for the first one.
        stats: counts, rates, times.
        reasoning: the reasoning before the answer to a chat, which is not in `text`; None if the model has none.
        reasoning_tokens: how many of `token_ids`, from the first on, belong to the reasoning.
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
        values = {name: value for name, value in vars(self).items() if name not in _NOT_PLAIN}
        values |= {"token_ids": list(self.token_ids), "same_text": str(self.same_text)}
        values["sampling"] = {name: getattr(self.params, name) for name in SHAPING}
        values["stats"] = self.stats.to_dict()
        if self.reasoning is not None:
            values |= {"reasoning": self.reasoning, "reasoning_tokens": self.reasoning_tokens}
        if self.logprobs is not None:
            values["logprobs"] = [entry.to_dict() for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            values["prompt_logprobs"] = [None if entry is None else entry.to_dict() for entry in self.prompt_logprobs]
        return values


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
    offline: bool = False  # whether it may pause while prompts of others are read
    reading: bool = True  # whether its prompt is still to be read, or to be read again
    # Of the prompt's tokens after the first one that are read so far; shared by all continuations of the prompt.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    # The running continuations of the prompt, in order; the first one collects the prompt's log-probabilities for all.
    siblings: list[Request] = field(default_factory=list, repr=False)
    reused: int = 0  # tokens reused from other requests instead of being read
    speculates: bool = True  # whether anything is drafted for it
    cache_salt: str = ""  # cached data is reused only by requests with the same salt
    share_text: bool = True  # whether such requests may draft from its tokens, and it from theirs
    reasoning: Reasoning | None = None  # how its output begins; None if all of it is the answer

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
        """Index of the next output token; the key of draws with shared noise."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.max_tokens - self.place

    @property
    def unscored(self) -> bool:
        """Whether it must still collect log-probabilities of the prompt."""
        return self._lacks_scores and not self._awaits_sibling

    @property
    def awaits_scores(self) -> bool:
        """Whether another continuation is collecting the log-probabilities of the prompt."""
        return self._lacks_scores and self._awaits_sibling

    @property
    def _lacks_scores(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def _awaits_sibling(self) -> bool:
        return bool(self.siblings) and self.siblings[0] is not self

    def leave(self) -> None:
        """Remove it from its siblings when it ends; the next one continues what the first does for all."""
        if self in self.siblings:
            self.siblings.remove(self)

    def score(self, logits: Float[Tensor, "rows vocab"], first: int) -> None:
        """Add the log-probabilities of prompt tokens, from the logits after position `first` on."""
        assert self.params.prompt_logprobs is not None, "only called if prompt_logprobs is requested"
        known = len(self.prompt_logprobs) - first  # not 0 if a prompt is read a second time
        tokens = self.tokens[first + 1 : first + 1 + logits.shape[0]]
        if known < len(tokens):
            self.prompt_logprobs += top_logprobs(logits[known:], tokens[known:], self.params.prompt_logprobs)

    def draft_request(self, limit: int, budget: DraftBudget = UNLIMITED) -> DraftRequest:
        """The view of the request that the drafter gets."""
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
        """Cut a verdict at the end of the request; add its tokens, text, statistics and log-probabilities.

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
