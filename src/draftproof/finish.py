"""The end of a generation, and its text: one cut before tokens are committed, streamed and counted.

A block of emitted tokens ends exactly where the same tokens would end one at a time: at EOS, a stop token, a stop
string or a length limit. Text that was streamed is never changed by a later token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from draftproof.errors import UserError
from draftproof.reasoning import Reasoning, ReasoningMarkers
from draftproof.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HIGH_BYTE = re.compile("<0x[89A-F][0-9A-F]>")


class TextDecoder:
    """Token ids to text, piece by piece: all pieces and the flush together are the text of all ids.

    Only a window of tokens is decoded: the tokens of the last piece, which give the decoder its context, and the tokens
    that have not become text yet. Text is held back while it ends in a replacement character (a character whose other
    bytes are still missing) or in a byte token of 0x80 or above (tokenizers with byte fallback decode a whole run of
    bytes or none of it).

    The text is `tokenizer.decode(ids, clean_up_tokenization_spaces=False)`, because cleaning up would depend on later
    tokens. There is one exception: an ASCII byte token (a line feed in Llama 2) becomes text at once, although invalid
    bytes right after it would make `decode` replace it too. Without a tokenizer there is no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer: Any = tokenizer  # transformers is untyped, and `push` handles None
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._returned = 0  # how many tokens at the start of the window have become text
        self._shown = ""  # the text of these tokens
        self._pending = ""  # the text of the window after the last push
        self._skipped: dict[int, bool] = {}

    def push(self, token_id: int) -> str:
        """Add a token and return the text that no later token can change; often the token's own text, or empty."""
        if self._tokenizer is None:
            return ""
        if self._is_skipped(token_id):  # this also keeps the window short where many such tokens follow each other
            return ""
        self._window.append(token_id)
        self._pending = self._decode(self._window)
        held = self._pending.endswith(_REPLACEMENT) or self._is_high_byte(token_id)
        return "" if held else self._release()

    def flush(self) -> str:
        """The text that was held back; no token may be pushed after this."""
        return self._release()

    def _release(self) -> str:
        fresh = self._pending[len(self._shown) :]
        if fresh:
            self._window = self._window[self._returned :]
            self._returned = len(self._window)
            self._shown = self._pending = self._decode(self._window)
        return fresh

    def _decode(self, ids: Sequence[int]) -> str:
        return self._text(ids, skip=self._skip)

    def _text(self, ids: Sequence[int], *, skip: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    def _is_skipped(self, token_id: int) -> bool:
        """Whether decoding leaves the token out because it is special (a leading space is left out as well)."""
        if token_id not in self._skipped:
            hidden = self._skip and not self._decode([token_id])
            self._skipped[token_id] = hidden and bool(self._text([token_id], skip=False))
        return self._skipped[token_id]

    def _is_high_byte(self, token_id: int) -> bool:
        return _HIGH_BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token_id))) is not None


class Finish(StrEnum):
    """Why a generation ended; the values are those of `finish_reason` in the OpenAI API and in vLLM."""

    ERROR = "error"
    LENGTH = "length"
    STOP = "stop"


@dataclass(frozen=True)
class Cut:
    """The part of a block of emitted tokens that belongs to the output."""

    kept: int  # number of tokens of the block that belong to the output, including the one that ends it
    text: str  # new text that can be streamed: no later token changes it
    finish: Finish | None  # why the generation ended in this block; None while it goes on
    stop_reason: int | str | None  # the stop token's id or the stop string, as in vLLM; None for EOS and length
    reasoning: str = ""  # new text of the model's reasoning, which is not in `text`
    reasoning_tokens: int = 0  # how many of the tokens, from the first on, belong to the reasoning


class Cutter:
    """Finds the end of one request: give it every block of emitted tokens, and keep the part that it returns.

    After each token it checks for EOS, stop tokens, stop strings in the text so far, and the length. Where a stop and
    the length limit fall on the same token, the reason is the stop. Of several stop strings, the one that is completed
    first ends the text (of those completed by the same character, the longest), so the text does not depend on how it
    was split into tokens. Before `min_tokens` tokens only the length can end a request, and a stop string must be
    completed by a later token, as in vLLM. The EOS or stop token at the end is one of the output tokens; its text is
    shown only with `include_stop_str_in_output`.

    Where the output has a form (`SamplingParams.form`), such as that of a grammar, stop strings and stop tokens count
    only before it begins: what has a form is whole, or is cut off by the length.

    Where the model reasons before its answer, only EOS and the length can end the request there. The text of the
    reasoning is kept apart; its markers and the headers of answers are in no text, nor are line breaks beside them.

    Args:
        tokenizer: None gives no text, and refuses stop strings.
        context_left: number of tokens that still fit into the model's context; a second limit besides `max_tokens`.
        reasoning: how the output begins; None where all of it is the answer.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        context_left: int | None = None,
        reasoning: Reasoning | None = None,
    ) -> None:
        if params.stop and tokenizer is None:
            raise UserError(f"stop: expected () without a tokenizer, got {params.stop!r}")
        if context_left is not None and context_left < 1:
            raise UserError(f"expected room for 1 or more tokens after the prompt, got {context_left}: shorten it")
        self._params = params
        self._stops = tuple(params.stop)
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._limit = min((bound for bound in (params.max_tokens, context_left) if bound is not None), default=None)
        self._tokenizer = tokenizer
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._form = params.form
        self._formed = self._form is not None and self._form.search("") is not None
        self._overlaps = [0] * len(self._stops)  # of the first `_measured` characters with each stop string
        self._measured = 0
        self._sent = 0
        self._markers = None if reasoning is None else reasoning.markers
        self._headers = {} if reasoning is None or reasoning.spent is not None else _headers(reasoning.markers, ())
        self._header: list[int] = []  # tokens that may be the beginning of one of them
        self._thoughts = TextDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._reasons = reasoning is not None and reasoning.spent is not None
        self._breaks = ""  # at the end of the reasoning so far
        self._begins = False  # whether line breaks at the beginning of the answer are left out
        self.count = 0  # tokens kept so far
        self.text = ""  # so far; while the generation goes on, its end may be held back from the stream
        self.reasoning = ""
        self.reasoning_tokens = 0  # its markers counted
        self.finish: Finish | None = None  # this and the next one as in `Cut`
        self.stop_reason: int | str | None = None

    def cut(self, emitted: Sequence[int]) -> Cut:
        """Add the tokens of one round in order, and return the part up to the end; a ValueError after that."""
        if self.finish is not None:
            raise ValueError(f"expected no token after the end ({self.finish}), got {len(emitted)}")
        before = self.count
        thought = len(self.reasoning)
        tokens = self.reasoning_tokens
        self._end_by_length()  # where no token is wanted
        for token in emitted:
            if self.finish is not None:
                break
            self._push(token)
        safe = len(self.text) - (0 if self.finish else self._open())
        fresh = self.text[self._sent : safe]
        self._sent = safe
        made = self.reasoning[thought:], self.reasoning_tokens - tokens
        return Cut(self.count - before, fresh, self.finish, self.stop_reason, *made)

    def _push(self, token: int) -> None:
        self.count += 1
        if self._headers and self._in_header(token):
            self.reasoning_tokens += 1
            self._end_by_length()
        elif self._reasons and token not in self._eos:
            self._think(token)
        else:
            self._say(token)

    def _in_header(self, token: int) -> bool:
        """Whether a token belongs to what reasoning or an answer begins with; what only looked like it is text."""
        self._header.append(token)
        given = tuple(self._header)
        if given in self._headers:
            self._reasons = self._headers[given]
        elif any(each[: len(given)] == given for each in self._headers):
            return True
        found = given in self._headers
        self._headers = {}
        for each in () if found else given[:-1]:
            self._append(self._decoder.push(each))
        self._header = []
        return found

    def _think(self, token: int) -> None:
        """Add a token of the reasoning."""
        assert self._markers is not None, "only models with markers reason apart"
        self.reasoning_tokens += 1
        self._end_by_length()
        self._reasons = token != self._markers.end
        self._begins = not self._reasons
        if not self._reasons and self._markers.turn:
            self._headers = _headers(self._markers, self._markers.turn)
        text = self._breaks + (self._thoughts.push(token) if self._reasons else "")
        if self.finish is not None or not self._reasons:
            text += self._thoughts.flush()
            self._thoughts = TextDecoder(self._tokenizer, skip_special_tokens=self._params.skip_special_tokens)
        fresh = text.rstrip("\n")
        self._breaks = text[len(fresh) :] if self._reasons else "\n"  # before what the model may reason again
        self.reasoning += fresh if self.reasoning else fresh.lstrip("\n")

    def _end_by_length(self) -> None:
        if self.count == self._limit:
            self._end(Finish.LENGTH, None)

    def _say(self, token: int) -> None:
        """Add a token of the answer."""
        early = self.count < self._params.min_tokens
        stopped = not early and (token in self._eos or (token in self._stop_ids and not self._formed))
        text = "" if stopped and not self._params.include_stop_str_in_output else self._decoder.push(token)
        if stopped:
            self._end(Finish.STOP, None if token in self._eos else token)
        else:
            self._end_by_length()
        text = text + self._decoder.flush() if self.finish else text
        if self._begins:
            text = text.lstrip("\n")
            self._begins = not text
        self._append(text)

    def _end(self, finish: Finish, reason: int | str | None) -> None:
        self.finish = finish
        self.stop_reason = reason

    def _append(self, fresh: str) -> None:
        """Add text, and end it at a stop string that the new text completes."""
        old = len(self.text)
        self.text += fresh
        if not fresh or self._formed:
            return
        free = self._free(old)
        if self.count <= self._params.min_tokens:
            return
        new = len(self.text) - self._measured
        near = [stop for stop, size in zip(self._stops, self._overlaps, strict=True) if size + new >= len(stop)]
        ends = [(at + len(stop), at, stop) for stop in near if (at := self._find(stop, old)) >= 0]
        found = [each for each in ends if each[0] <= free]
        if found:
            end, start, stop = min(found)
            self.text = self.text[: end if self._params.include_stop_str_in_output else start]
            self._end(Finish.STOP, stop)

    def _free(self, old: int) -> int:
        """Number of characters in which stop strings count; the text after the first `old` is new."""
        if self._form is None:
            return len(self.text)
        found = self._form.search(self.text, max(0, old - len(self._form.pattern)))
        self._formed = found is not None
        return len(self.text) if found is None else found.end() - 1  # as if its characters came one at a time

    def _find(self, stop: str, old: int) -> int:
        """The start of the first `stop` that ends after the first `old` characters, or -1."""
        return self.text.find(stop, max(0, old - len(stop) + 1))

    def _open(self) -> int:
        """Number of characters at the end that could be the beginning of a stop string."""
        if self._formed or not self._stops:
            return 0
        new = len(self.text) - self._measured
        self._measured = len(self.text)
        sizes = zip(self._stops, self._overlaps, strict=True)
        self._overlaps = [overlap(self.text, stop, size + new) for stop, size in sizes]
        return max(self._overlaps)


def _headers(markers: ReasoningMarkers, before: tuple[int, ...]) -> dict[tuple[int, ...], bool]:
    """What reasoning and an answer begin with at a place, and whether that is reasoning."""
    made = {(*before, *markers.first): True, (*before, *markers.answer): False}
    made.pop((), None)
    return made


def overlap(text: str, stop: str, most: int | None = None) -> int:
    """The length of the longest proper prefix of `stop` that `text` ends with.

    `most` is an upper bound, such as the last answer and the characters since then: with it, the time for all of a text
    is in proportion to its length, whatever it is.
    """
    longest = len(stop) - 1 if most is None else min(len(stop) - 1, most)
    start = max(len(text) - longest, 0)
    while (start := text.find(stop[0], start)) >= 0:  # most places are passed over without a comparison
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
