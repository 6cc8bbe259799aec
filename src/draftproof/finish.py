"""Where a generation ends and what text it shows: one cut, made before commit, stream and statistics.

Knows: EOS, stop tokens, stop strings, length, and how token ids become text that never has to be taken back. Does not
know: models, drafts, rounds; a block of emitted tokens ends exactly where the same tokens would one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from draftproof.errors import UserError
from draftproof.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HIGH_BYTE = re.compile("<0x[89A-F][0-9A-F]>")


class TextDecoder:
    """Token ids to text, piece by piece: all pieces and the flush together are the text of all ids.

    Only a window is decoded: the tokens behind the last piece, which give the decoder its context, and those not shown
    yet. Text is held back while it ends in a replacement character (bytes of a character still to come) or in a byte
    token of 0x80 or above (tokenizers with byte fallback decode a whole run of bytes or none of it).

    The text is `tokenizer.decode(ids, clean_up_tokenization_spaces=False)`: cleaning up looks ahead. One exception:
    an ASCII byte token (a line feed in Llama 2) is shown at once, though invalid bytes right after it would make
    `decode` replace it too.

    Args:
        tokenizer: None gives no text.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer: Any = tokenizer  # transformers is untyped, and `push` lets no None through
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._behind = 0  # how many tokens of the window are shown already
        self._shown = ""  # the text of those
        self._pending = ""  # the text of the window after the last push
        self._skipped: dict[int, bool] = {}

    def push(self, token_id: int) -> str:
        """The text that is certain now that this token is known; often one token's, or empty."""
        if self._tokenizer is None:
            return ""
        if self._is_skipped(token_id):  # also to keep the window short where such tokens come in long runs
            return ""
        self._window.append(token_id)
        self._pending = self._decode(self._window)
        held = self._pending.endswith(_REPLACEMENT) or self._is_high_byte(token_id)
        return "" if held else self._release()

    def flush(self) -> str:
        """What was held back, as it stands; nothing is pushed after it."""
        return self._release()

    def _release(self) -> str:
        fresh = self._pending[len(self._shown) :]
        if fresh:
            self._window = self._window[self._behind :]
            self._behind = len(self._window)
            self._shown = self._pending = self._decode(self._window)
        return fresh

    def _decode(self, ids: Sequence[int]) -> str:
        return self._text(ids, skip=self._skip)

    def _text(self, ids: Sequence[int], *, skip: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    def _is_skipped(self, token_id: int) -> bool:
        """Whether decoding leaves the token out because it is special, and not because it is, say, a leading space."""
        if token_id not in self._skipped:
            hidden = self._skip and not self._decode([token_id])
            self._skipped[token_id] = hidden and bool(self._text([token_id], skip=False))
        return self._skipped[token_id]

    def _is_high_byte(self, token_id: int) -> bool:
        return _HIGH_BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token_id))) is not None


class Finish(StrEnum):
    """Why a generation ended; the values are OpenAI's and vLLM's finish_reason."""

    ERROR = "error"
    LENGTH = "length"
    STOP = "stop"


@dataclass(frozen=True)
class Cut:
    """What is left of a block of emitted tokens.

    Attributes:
        kept: how many of its tokens belong to the output, the finishing one included.
        text: new text that is safe to stream: no later token takes it back.
        finish: why the generation ended in this block; None while it goes on.
        stop_reason: as in vLLM the stop token's id or the stop string; None for EOS and length.
    """

    kept: int
    text: str
    finish: Finish | None
    stop_reason: int | str | None


class Cutter:
    """One request's ending: feed it every block of emitted tokens, keep what it keeps.

    Looked at after each token: EOS, stop tokens, stop strings in the text so far, length; a stop wins over the length
    it falls on. Of several stop strings the one completed first ends the text (of those completed by the same character
    the longest), so the text does not depend on how it was split into tokens. Before min_tokens tokens nothing but
    length counts, and a stop string must be completed by a later token, as in vLLM. The finishing EOS or stop token
    stays among the tokens; its text is shown only with include_stop_str_in_output.

    Args:
        params: the request's.
        eos_token_ids: the model's end-of-sequence ids.
        tokenizer: None gives no text, and refuses stop strings.
        room: the most tokens the model's context has left, a second limit beside max_tokens.

    Attributes:
        count: tokens kept so far.
        text: all text so far; while the generation goes on, its end may not be streamed yet.
        finish, stop_reason: as in `Cut`.

    Raises:
        ValueError: stop strings without a tokenizer; room for no token.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        room: int | None = None,
    ) -> None:
        if params.stop and tokenizer is None:
            raise UserError(f"stop is {params.stop!r}, but there is no tokenizer: legal is ()")
        if room is not None and room < 1:
            raise UserError(f"the context has room for {room} tokens: legal is 1 or more")
        self._params = params
        self._stops = tuple(params.stop)
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._limit = min((bound for bound in (params.max_tokens, room) if bound is not None), default=None)
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._sent = 0
        self.count = 0
        self.text = ""
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None

    def cut(self, emitted: Sequence[int]) -> Cut:
        """Takes the tokens of one round in order and drops what follows the end.

        Raises:
            ValueError: the generation has ended already.
        """
        if self.finish is not None:
            raise ValueError(f"{len(emitted)} tokens came after the end ({self.finish}): legal is none")
        before = self.count
        for token in emitted:
            self._push(token)
            if self.finish is not None:
                break
        safe = len(self.text) - (0 if self.finish else self._open())
        fresh, self._sent = self.text[self._sent : safe], safe
        return Cut(self.count - before, fresh, self.finish, self.stop_reason)

    def _push(self, token: int) -> None:
        self.count += 1
        early = self.count < self._params.min_tokens
        stopped = not early and (token in self._eos or token in self._stop_ids)
        text = "" if stopped and not self._params.include_stop_str_in_output else self._decoder.push(token)
        if stopped:
            self._end(Finish.STOP, None if token in self._eos else token)
        elif self.count == self._limit:
            self._end(Finish.LENGTH, None)
        self._append(text + self._decoder.flush() if self.finish else text)

    def _end(self, finish: Finish, reason: int | str | None) -> None:
        self.finish, self.stop_reason = finish, reason

    def _append(self, fresh: str) -> None:
        """Adds text and ends it at a stop string that the addition completes."""
        old = len(self.text)
        self.text += fresh
        if not fresh or self.count <= self._params.min_tokens:
            return
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._find(stop, old)) >= 0]
        if found:
            end, start, stop = min(found)
            self.text = self.text[: end if self._params.include_stop_str_in_output else start]
            self._end(Finish.STOP, stop)

    def _find(self, stop: str, old: int) -> int:
        """Where the first `stop` begins that ends after the first `old` characters, or -1."""
        return self.text.find(stop, max(0, old - len(stop) + 1))

    def _open(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        return max((_overlap(self.text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
