"""Grammars that an answer must fit, by llguidance: one more transform, which masks the logits of every drafted context.

A grammar is written as a text: `json_object`, `json_schema:SCHEMA`, `regex:PATTERN` or `lark:GRAMMAR`. After a context
those tokens are legal that some fitting answer goes on with, and an end token where the answer is complete; where only
one text can follow, the tokens that the tokenizer itself would write it with. The output distribution is that of the
target with this mask, token by token, with and without drafts. JSON is written without blanks between its parts, unless
the schema's own `x-guidance` says otherwise: small models would fill the answer with them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from draftproof.errors import NoTokenError, UserError, reason
from draftproof.sampling import Constraint

_KEPT = 256  # compiled grammars, more than requests that wait: the one that was used longest ago goes first
_LIMITS: Any = {  # of work and memory: a grammar beyond them fails, alone
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_COMPACT: Any = {"whitespace_flexible": False}


class Matcher:
    """Where an answer stands in a grammar; it is moved from context to context by taking tokens back.

    Args:
        matcher: llguidance's, at the beginning.
        vocab_size: the width of the masks.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._start, self._vocab_size = matcher, vocab_size
        self._matcher = matcher.deep_copy()
        self._read: list[int] = []
        self._outputs = -1
        self._masks: dict[tuple[int, ...], Bool[Tensor, " vocab"]] = {}

    def fresh(self) -> Matcher:
        """See Constraint."""
        return Matcher(self._start, self._vocab_size)

    def allowed(self, output_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> Bool[Tensor, "rows vocab"]:
        """See Constraint."""
        if len(output_ids) != self._outputs:  # drafter and target ask for the same contexts in a round
            self._outputs = len(output_ids)
            self._masks.clear()
        return torch.stack([self._mask(output_ids, tuple(path)) for path in paths])

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """See Constraint."""
        return list(self._matcher.compute_ff_tokens()) if self._move(list(output_ids)) else []

    def _mask(self, output_ids: Sequence[int], path: tuple[int, ...]) -> Bool[Tensor, " vocab"]:
        if path not in self._masks:
            self._masks[path] = self._computed([*output_ids, *path])
        return self._masks[path]

    def _computed(self, context: list[int]) -> Bool[Tensor, " vocab"]:
        if not self._move(context):  # a drafted token was not legal: nothing below it can be reached
            return torch.ones(self._vocab_size, dtype=torch.bool)
        bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        if self._matcher.is_error():
            first = self._matcher.get_error().splitlines()[0]
            raise NoTokenError(f"the grammar cannot be followed any further: {first[:120]}")
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        size = min(self._vocab_size, len(bias))
        mask[:size] = bias[:size] != 0
        return mask

    def _move(self, context: list[int]) -> bool:
        """Go to a context; whether the grammar has it."""
        same = 0
        for old, new in zip(self._read, context, strict=False):
            if old != new:
                break
            same += 1
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
            del self._read[same:]
        rest = context[same:]
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._read += rest[:taken]
        return bool(taken == len(rest))


class Grammars:
    """Compiles grammars for one model; threads may share it.

    Args:
        tokenizer: llguidance's, of the model.
        vocab_size: the width of the model's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiled: dict[str, Matcher] = {}
        self._compiling = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
        """For a transformers tokenizer.

        Raises:
            UserError: llguidance is not installed, or cannot read the tokenizer; a model without an end token.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise UserError("a grammar needs llguidance: pip install 'draftproof[serve]'") from None
        if tokenizer is None or not eos_token_ids:
            raise UserError("a grammar needs a model with a tokenizer and an end token")
        try:
            text = tokenizer.backend_tokenizer.to_str()
            made = LLTokenizer(text, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(eos_token_ids))
        except Exception as cause:
            raise UserError(f"grammars cannot be used with this model's tokenizer: {reason(cause)}") from cause
        return cls(made, vocab_size)

    def constraint(self, spec: str) -> Constraint:
        """A grammar at its beginning.

        Args:
            spec: as in the module's docstring.

        Raises:
            UserError: a grammar that cannot be read, or is too large.
        """
        found = self._known(spec)
        if found is None:
            with self._compiling:  # who asks for a known grammar, such as an engine's thread, does not wait for this
                found = self._known(spec) or self._keep(spec, self._compile(spec))
        return found.fresh()

    def _known(self, spec: str) -> Matcher | None:
        """A compiled grammar, now the one that was used last."""
        with self._lock:
            found = self._compiled.pop(spec, None)
            if found is not None:
                self._compiled[spec] = found
            return found

    def _keep(self, spec: str, made: Matcher) -> Matcher:
        with self._lock:
            self._compiled[spec] = made
            while len(self._compiled) > _KEPT:
                del self._compiled[next(iter(self._compiled))]
            return made

    def _compile(self, spec: str) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**_LIMITS)
        kind, _, text = spec.partition(":")
        try:
            if kind == "regex":
                source = LLMatcher.grammar_from_regex(text)
            elif kind == "lark":
                source = LLMatcher.grammar_from_lark(text)
            else:
                source = LLMatcher.grammar_from_json_schema(_schema(text), defaults=_COMPACT)
        except ValueError as cause:
            raise UserError(f"grammar {kind} cannot be read: {reason(cause)}") from cause
        if problem := LLMatcher.validate_grammar(source, self._tokenizer, limits=limits):
            raise UserError(f"grammar {kind} cannot be read: {' '.join(problem.split())[:200]}")
        made = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if made.is_error():
            raise UserError(f"grammar {kind} cannot be used: {made.get_error().splitlines()[0][:200]}")
        return Matcher(made, self._vocab_size)


def _schema(text: str) -> Any:
    """A JSON schema; without a text that of any object."""
    found = json.loads(text) if text else {"type": "object"}
    if not isinstance(found, dict):
        raise ValueError("a schema is an object")  # noqa: TRY004 - reported as a value that cannot be used
    return found
