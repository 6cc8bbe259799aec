"""Grammars that an answer must fit, by llguidance: one more transform, which masks the logits of every drafted context.

A grammar is written as a text: `json_object`, `json_schema:SCHEMA`, `regex:PATTERN` or `lark:GRAMMAR`. After a context
the tokens are allowed with which some fitting answer goes on, and an end token where the answer is complete; where only
one text can follow, the tokens that the tokenizer itself would write it with. The output distribution is that of the
target with this mask, token by token, with and without drafts. JSON is written without blanks between its parts, unless
the schema's own `x-guidance` says otherwise: small models would fill the answer with them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from draftproof.errors import NoTokenError, UserError, is_panic, reason
from draftproof.grammar_check import BusyError, Checker, Cost
from draftproof.grammar_compile import begin, compiled, on_large_stack, shortened
from draftproof.sampling import Constraint

MOST_CHARACTERS = 131_072  # of a grammar
_KEPT = 16  # compiled grammars: the one that was used longest ago goes first
_MOST_KEPT = 128 << 20  # bytes that they hold
_MOST_HELD = 1 << 30  # bytes that they hold together with those of open requests
_SHARED_SECONDS = 0.1  # of compiling: what takes longer is compiled for each request, and never while one is decoded
_SLOW_MASK = 0.003  # seconds: a mask that takes longer has made new states of the lexer, which stay
_MOST_GROWTH = 0.5  # seconds of such masks, after which a grammar is compiled again for later requests
_Made = TypeVar("_Made")


class _Stuck(Exception):  # noqa: N818 - no error of the user's yet
    """llguidance cannot go on, or has contradicted itself."""


class _Compiled:
    """A compiled grammar, and what that took. Matchers are copies of one, and share its lexer with the lexer's limits.

    `forget` is called when later requests are to get another one, so that its lexer's memory is given back.
    """

    def __init__(self, make: Callable[[], Any], cost: Cost, forget: Callable[[], None] = lambda: None) -> None:
        self._make = make
        self.cost = cost
        self._forget = forget
        self._matcher = make()
        self.users = 0  # requests
        self._growth = 0.0  # seconds of masks that were slow
        self._stuck = False

    def matcher(self) -> Any:
        """A new matcher at the beginning."""
        return self._matcher.deep_copy()

    def again(self) -> _Compiled:
        """The same with a lexer of its own."""
        made = _Compiled(self._make, self.cost)
        made.users = 1
        return made

    @property
    def worn(self) -> bool:
        """Whether later requests get another one."""
        return self._stuck or self._growth > _MOST_GROWTH

    def wear(self, seconds: float = 0.0, *, stuck: bool = False) -> None:
        """Note that its lexer has grown: by a mask that took so long, or as far as it may."""
        self._growth += seconds
        self._stuck |= stuck
        if self.worn:
            self._forget()


class Matcher(Constraint):
    """Where an answer stands in a grammar; it is moved from context to context by taking tokens back.

    A grammar with `max_tokens` or `stop` cannot take tokens back. Its matcher is copied from one that has read the
    committed tokens only. `ends` are tokens that end a text.
    """

    def __init__(self, grammar: _Compiled, vocab_size: int, ends: Sequence[int]) -> None:
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)
        self._output: list[int] = []
        self._goes_back = True
        self._begin()

    def _begin(self) -> None:
        self._matcher = self._grammar.matcher()
        self._read = list[int]()
        # it never reads drafted tokens
        self._base = self._grammar.matcher()
        self._base_read = list[int]()
        self._masks: dict[tuple[int, ...], Bool[Tensor, " vocab"]] = {}

    @override
    def fresh(self) -> Matcher:
        return Matcher(self._grammar, self._vocab_size, tuple(self._ends))

    @override
    def allowed(self, output_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> Bool[Tensor, "rows vocab"]:
        """The rows after each path; a NoTokenError where the grammar cannot be followed any further."""
        return self._followed(lambda: torch.stack([self._mask(output_ids, tuple(path)) for path in paths]), output_ids)

    @override
    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that must come next; a NoTokenError as of `allowed`."""
        return self._followed(self._forced, output_ids)

    def _followed(self, find: Callable[[], _Made], output_ids: Sequence[int]) -> _Made:
        """What is found after committed tokens; if need be with a lexer that no other request has used."""
        if len(output_ids) != len(self._output):  # drafter and target ask for the same contexts in a round
            self._masks.clear()
        self._output = list(output_ids)
        try:
            return _calmly(find)
        except _Stuck as cause:
            self._grammar.wear(stuck=True)
            problem = str(cause)
        if self._grammar.users > 1 and not problem.startswith("parser error"):
            self._grammar = _calmly(self._grammar.again)
            self._begin()
            try:
                return _calmly(find)
            except _Stuck as cause:
                problem = str(cause)
        raise NoTokenError(f"the grammar cannot be followed any further: {problem}")

    def _mask(self, output_ids: Sequence[int], path: tuple[int, ...]) -> Bool[Tensor, " vocab"]:
        if path not in self._masks:
            self._masks[path] = self._computed([*output_ids, *path])
        return self._masks[path]

    def _computed(self, context: list[int]) -> Bool[Tensor, " vocab"]:
        """The mask after a context. Below a drafted token that is not allowed, it is the mask above."""
        taken = self._move(context)
        start = time.perf_counter()
        bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        spent = time.perf_counter() - start
        if spent > _SLOW_MASK:
            self._grammar.wear(spent)
        self._refuse_error()
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        size = min(self._vocab_size, len(bias))
        mask[:size] = bias[:size] != 0
        if taken < len(context):
            refused = context[taken]
            if mask[refused] and refused not in self._ends:
                raise _Stuck(f"token {refused} is allowed but cannot be read")
            self._refuse_rejected(taken)
        return mask

    def _forced(self) -> list[int]:
        self._refuse_rejected(self._move(self._output))
        tokens = list(self._matcher.compute_ff_tokens())
        self._refuse_error()
        return tokens

    def _refuse_rejected(self, taken: int) -> None:
        if taken < len(self._output):
            raise NoTokenError(
                f"the answer does not fit its grammar: its token {taken} is {self._output[taken]}, which is not allowed"
            )

    def _refuse_error(self) -> None:
        if self._matcher.is_error():
            raise _Stuck(shortened(self._matcher.get_error()))

    def _move(self, context: list[int]) -> int:
        """Go to a context; how many of its tokens the grammar has."""
        same = _common(self._read, context)
        if same < len(self._read):
            self._goes_back = self._goes_back and self._matcher.rollback(len(self._read) - same)
            if self._goes_back:
                del self._read[same:]
            else:
                self._restart(context)
        rest = context[len(self._read) :]
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._refuse_error()
        self._read += rest[:taken]
        return len(self._read)

    def _restart(self, context: list[int]) -> None:
        """Begin anew from what was committed."""
        if _common(self._base_read, context) < len(self._base_read):  # a failed round took committed tokens back
            self._base = self._grammar.matcher()
            self._base_read = []
        rest = self._output[len(self._base_read) : _common(self._output, context)]
        if rest:
            self._base_read += rest[: self._base.try_consume_tokens(rest)]
        self._matcher = self._base.deep_copy()
        self._read = list(self._base_read)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with that are the same."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def _calmly(call: Callable[[], _Made]) -> _Made:
    """What a call into llguidance returns; _Stuck where it failed, or panicked."""
    try:
        return call()
    except ValueError as error:
        if isinstance(error, NoTokenError):
            raise
        raise _Stuck(reason(error)) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise _Stuck(shortened(str(error))) from error


class Grammars:
    """Compiles grammars for one model, given llguidance's tokenizer and the width of its logits; threads may share it.

    No lock is held while a grammar is compiled. Without a checker, a grammar that takes too much is not refused.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, checker: Checker | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._checker = checker
        self._lock = threading.Lock()
        self._compiled: dict[str, _Compiled] = {}
        self._held: weakref.WeakSet[_Compiled] = weakref.WeakSet()

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
        """For a transformers tokenizer."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise UserError("a grammar needs llguidance: pip install 'draftproof[serve]'") from None
        if tokenizer is None or not eos_token_ids:
            raise UserError("a grammar needs a model with a tokenizer and an end token")
        size, ends = max(vocab_size, len(tokenizer)), list(eos_token_ids)
        try:
            text = tokenizer.backend_tokenizer.to_str()
            made = LLTokenizer(text, n_vocab=size, eos_token=ends)
        except BaseException as cause:
            if not isinstance(cause, Exception) and not is_panic(cause):
                raise
            raise UserError(f"grammars cannot be used with this model's tokenizer: {reason(cause)}") from cause
        return cls(made, vocab_size, Checker(text, size, ends))

    def constraint(self, spec: str) -> Constraint:
        """A grammar, written as the module's docstring has it, at its beginning, for one request."""
        found = self._known(spec) or self._new(spec)
        found.users += 1
        return Matcher(found, self._vocab_size, self._tokenizer.eos_tokens)

    def _known(self, spec: str) -> _Compiled | None:
        """A compiled grammar, now the one that was used last."""
        with self._lock:
            found = self._compiled.pop(spec, None)
            if found is None or found.worn:
                return None
            self._compiled[spec] = found
            return found

    def _new(self, spec: str) -> _Compiled:
        kind, _, text = spec.partition(":")
        if len(text) > MOST_CHARACTERS:
            raise UserError(f"grammar {kind}: expected at most {MOST_CHARACTERS} characters, got {len(text)}")
        cost = Cost(0.0, 0) if self._checker is None else self._checker.cost(kind, text)
        self._make_room(cost.size)

        def make() -> Any:
            matcher = compiled(self._tokenizer, kind, text)
            begin(matcher)
            return matcher

        try:
            made = _Compiled(lambda: on_large_stack(make), cost, partial(self._forget, spec))
        except ValueError as cause:
            raise UserError(f"grammar {kind} cannot be read: {reason(cause)}") from cause
        with self._lock:
            self._held.add(made)
            if cost.seconds <= _SHARED_SECONDS and cost.size <= _MOST_KEPT:
                self._compiled[spec] = made
                self._trim(_KEPT, _MOST_KEPT)
        return made

    def _forget(self, spec: str) -> None:
        """Drop a grammar that is worn."""
        with self._lock:
            found = self._compiled.get(spec)
            if found is not None and found.worn:
                del self._compiled[spec]

    def _make_room(self, size: int) -> None:
        """Forget kept grammars where memory for one more is short; a BusyError where open requests hold it."""
        with self._lock:
            if self._size(self._held) + size > _MOST_HELD:
                self._compiled.clear()
            if self._size(self._held) + size > _MOST_HELD:
                raise BusyError("grammar: those of open requests take all memory for grammars: try again later")

    def _trim(self, most: int, size: int) -> None:
        while len(self._compiled) > most or self._size(self._compiled.values()) > size:
            del self._compiled[next(iter(self._compiled))]

    @staticmethod
    def _size(grammars: Any) -> int:
        return sum(each.cost.size for each in list(grammars))
