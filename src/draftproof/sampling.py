"""From logits to probabilities: SamplingParams (vLLM's names), the transforms that they request, and log-probabilities.

Penalties depend on the drafted path above a row. Where a generation ends is decided in `finish`.

Order, as vLLM's V1 sampler: cast to float32; grammar; bad words; min_tokens; logit bias; repetition, frequency and
presence penalties; temperature; min-p; top-k; top-p; softmax. Masks are -inf, so they commute with the bias.
"""

from __future__ import annotations

import math
import numbers
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, no_type_check, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from draftproof import native
from draftproof.bad_words import BadWords, bad_word_ids
from draftproof.errors import NoTokenError, UserError, blamed_on

_NEVER = -math.inf
_GRAMMAR = re.compile(r"json_object\Z|(json_schema|regex|lark):.", re.DOTALL)
_ALL = re.compile("")  # it is found at the beginning of any text
# A float32 reciprocal outside these overflows or vanishes; inside, temperatures change nothing more.
_COLDEST, _HOTTEST = 1e-30, 1e30
# The nucleus is first looked for among this many candidates: at usual settings it is far smaller.
_GUESS = 256


def _invalid(name: str, value: object, expected: str) -> UserError:
    shown = repr(value)
    return UserError(f"{name}: expected {expected}, got {shown if len(shown) <= 80 else shown[:77] + '...'}")


def _integer(name: str, value: object, low: int, high: int | None, expected: str) -> int:
    """`value` as an int of [low, high]; True and False are not numbers here."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _invalid(name, value, expected)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise _invalid(name, value, expected)
    return number


def _real(name: str, value: object, fits: Callable[[float], bool], expected: str) -> float:
    """`value` as a finite float that `fits`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _invalid(name, value, expected)
    try:
        number = float(value)
    except OverflowError:
        raise _invalid(name, value, expected) from None
    if not math.isfinite(number) or not fits(number):
        raise _invalid(name, value, expected)
    return number


def _strings(name: str, value: object) -> tuple[str, ...]:
    """`value` as a tuple of non-empty strings that UTF-8 can carry."""
    expected = "a sequence of non-empty strings"
    if isinstance(value, str) or not isinstance(value, Collection):
        raise _invalid(name, value, expected)
    for text in value:
        if not isinstance(text, str) or not text or any("\ud800" <= char <= "\udfff" for char in text):
            raise _invalid(name, value, expected)
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    expected = "a sequence of token ids, integers >= 0"
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise _invalid(name, value, expected)
    return tuple(_integer(name, token, 0, None, expected) for token in value)


def _bias(value: object) -> dict[int, float] | None:
    expected = "a mapping from token ids >= 0 to numbers in [-100, 100]"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _invalid("logit_bias", value, expected)
    return {
        _integer("logit_bias", token, 0, None, expected): _real("logit_bias", bias, lambda x: abs(x) <= 100, expected)
        for token, bias in value.items()
    } or None


_INTEGERS: dict[str, tuple[int, int | None, str]] = {
    "n": (1, None, "an integer >= 1"),
    "top_k": (-1, None, "an integer >= 1, or 0 or -1 for off"),
    "min_tokens": (0, None, "an integer >= 0"),
    "max_tokens": (0, None, "an integer >= 0, or None for no limit"),
    "seed": (-(1 << 63), (1 << 63) - 1, "an integer of 64 bits, or None"),
    "logprobs": (0, None, "an integer >= 0, or None"),
    "prompt_logprobs": (0, None, "an integer >= 0, or None"),
    "thinking_token_budget": (0, None, "an integer >= 0, or None"),
}
_REALS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "a finite number >= 0 (0 is greedy)"),
    "top_p": (lambda x: 0 < x <= 1, "0 < top_p <= 1"),
    "min_p": (lambda x: 0 <= x <= 1, "0 <= min_p <= 1"),
    "repetition_penalty": (lambda x: 1e-4 <= x <= 1e4, "0.0001 <= repetition_penalty <= 10000 (1 is off)"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "-2 <= presence_penalty <= 2"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "-2 <= frequency_penalty <= 2"),
}
SHAPING = (  # parameters that change the distribution of every token
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "thinking_token_budget")


@no_type_check  # for type checkers at run time: this class checks its values itself, and its messages name them
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request, and when it ends; names and meanings are vLLM's.

    Values are checked and normalized on construction: `stop`, `bad_words` and `stop_token_ids` become tuples (None is
    empty, one `stop` string is a tuple of one), and `top_k` -1 becomes 0.

    Attributes:
        n: number of continuations of the prompt.
        temperature: 0 is greedy: all mass on the most likely token, ties to the lowest id.
        top_k: keep the k most likely tokens and all tied with the k-th; 0 or -1 is off.
        top_p: keep the fewest tokens, most likely first, whose mass reaches top_p; ties to the lowest id.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted once for each occurrence of the token in the output.
        logit_bias: added to the logits of these token ids.
        bad_words: texts that must not occur in the output (matched as token sequences).
        stop: texts that end the output. With a grammar they have no effect, since the grammar decides where it ends.
        stop_token_ids: tokens that end the output; with a grammar they have no effect.
        include_stop_str_in_output: include the stop string, or the text of the stop token, at the end of the text.
        ignore_eos: continue after the end-of-sequence token.
        min_tokens: before this many tokens, EOS and stop tokens have probability 0, and stop strings have no effect.
        max_tokens: the most tokens to emit; None is limited by the model's context only, 0 only reads the prompt.
        seed: seed of this request's random draws; None lets the engine choose.
        logprobs: number of best tokens to report with each emitted token; None reports nothing.
        logprobs_mode: distribution of `logprobs`: raw_logprobs is the model's own, processed_logprobs the one that is
            sampled from, after temperature, penalties and all other parameters.
        prompt_logprobs: number of best tokens to report with each token of the prompt, by the model's own distribution;
            None reports nothing. The prompt is then read without the prefix cache.
        skip_special_tokens: leave special tokens out of the text.
        thinking_token_budget: the most tokens of reasoning before the answer (see `draftproof.reasoning`); None for no
            limit. It has no effect if the model does not reason.
        grammar: the form of the answer: json_object, json_schema:SCHEMA, regex:PATTERN or lark:GRAMMAR (see
            `draftproof.grammar`).

    Raises:
        UserError: a value of the wrong type or range; the message names the field, what is expected and the value.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 128
    seed: int | None = None
    logprobs: int | None = None
    logprobs_mode: str = "raw_logprobs"
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    thinking_token_budget: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, (low, high, expected) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, _integer(name, value, low, high, expected))
        for name, (fits, expected) in _REALS.items():
            self._set(name, _real(name, getattr(self, name), fits, expected))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "True or False")
        self._normalise()

    def _normalise(self) -> None:
        self._set("top_k", max(self.top_k, 0))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("bad_words", _strings("bad_words", () if self.bad_words is None else self.bad_words))
        stop: object = () if self.stop is None else self.stop
        self._set("stop", _strings("stop", (stop,) if isinstance(stop, str) else stop))
        self._set(
            "stop_token_ids", _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids)
        )
        if self.grammar is not None:
            self._check_grammar()
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise _invalid("logprobs_mode", self.logprobs_mode, " or ".join(LOGPROBS_MODES))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"0 <= min_tokens <= max_tokens={self.max_tokens}")

    def _check_grammar(self) -> None:
        grammar: object = self.grammar
        if not isinstance(grammar, str) or not _GRAMMAR.match(grammar):
            raise _invalid("grammar", grammar, "json_object, json_schema:SCHEMA, regex:PATTERN or lark:GRAMMAR")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise _invalid(name, getattr(self, name), "off with a grammar, which decides where an answer ends")

    @property
    def form(self) -> re.Pattern[str] | None:
        """Where this is found in the output its form begins: from there on no stop string or stop token ends it."""
        return None if self.grammar is None else _ALL

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def bind(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        prompt_ids: Sequence[int] = (),
        encode: Callable[[str], Sequence[int]] | None = None,
        constraint: Constraint | None = None,
        bad_words: BadWords | None = None,
    ) -> Transforms:
        """These parameters for one prompt and one model: what the engine builds once for each request.

        Args:
            vocab_size: the width of the model's logits.
            eos_token_ids: the model's end-of-sequence ids.
            prompt_ids: the prompt.
            encode: text to token ids without special tokens; needed where `bad_words` are not encoded yet.
            constraint: the grammar at its beginning, where these parameters have one.
            bad_words: those of these parameters, where they are encoded already: once for many prompts.

        Raises:
            UserError: a token id outside the vocabulary; bad words without a tokenizer, or that encode to nothing.
        """
        words = BadWords(bad_word_ids(self.bad_words, encode)) if bad_words is None else bad_words
        return Transforms(self, vocab_size, tuple(eos_token_ids), tuple(prompt_ids), words, constraint)


_GENERATION_CONFIG = {  # a generation config's names for these
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
MODEL_DEFAULTS = tuple(_GENERATION_CONFIG.values())  # the parameters that a checkpoint can have defaults of its own for


def default_params(generation_config: Mapping[str, Any], model: str = "the model") -> SamplingParams:
    """The sampling parameters that a checkpoint's generation config names; all others at their defaults.

    As in vLLM these are temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens. `do_sample` is not
    looked at: temperature 0 requests greedy decoding.

    Args:
        generation_config: the fields that the checkpoint sets.
        model: its name, for errors.

    Raises:
        UserError: a value that no request could have.
    """
    names = {ours: generation_config.get(theirs) for theirs, ours in _GENERATION_CONFIG.items()}
    try:
        return SamplingParams(**{name: value for name, value in names.items() if value is not None})
    except UserError as cause:
        raise UserError(f"the generation config of {model}: {cause}; generation_config none leaves it alone") from None


@runtime_checkable
class Constraint(Protocol):
    """What tokens may follow each context of one continuation."""

    def fresh(self) -> Constraint:
        """The same, for another continuation."""

    def allowed(self, output_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> Bool[Tensor, "rows vocab"]:
        """For each path after the committed tokens a mask of the tokens that may follow; any, where none can be.

        Raises:
            NoTokenError: the committed tokens do not fit, or what may follow cannot be found.
        """

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that must follow the committed ones, as far as there is no choice."""


@runtime_checkable
class ScoreProcessor(Protocol):
    """Changes scores by code of the caller's own, such as transformers' logits processors."""

    def __call__(
        self, scores: Float[Tensor, "rows vocab"], output_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Float[Tensor, "rows vocab"]:
        """New scores of each row, which may depend on its context: the committed tokens and the row's drafted path."""


@dataclass(frozen=True)
class Transforms:
    """Sampling parameters bound to one request: everything `probabilities` needs but the tokens generated so far.

    Attributes:
        params: the request's parameters.
        vocab_size: the width of the logits.
        eos_token_ids: end-of-sequence ids; those outside the vocabulary cannot occur and are dropped.
        prompt_ids: the prompt; only the repetition penalty looks at it.
        bad_words: token sequences that the output never completes.
        constraint: masks what does not fit the request's grammar; None without one.
        processor: changes the scores after all edits of single logits, and before the temperature; None without one.

    Raises:
        UserError: a token id outside the vocabulary.
    """

    params: SamplingParams
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    bad_words: BadWords = field(default_factory=BadWords)
    constraint: Constraint | None = None
    processor: ScoreProcessor | None = None
    _placed: dict[tuple[str, Any, Any], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        eos = tuple(token for token in self.eos_token_ids if 0 <= token < self.vocab_size)
        object.__setattr__(self, "eos_token_ids", eos)
        self._check_ids("logit_bias", self.params.logit_bias or ())
        self._check_ids("stop_token_ids", self.params.stop_token_ids)
        self._check_ids("bad_words", self.bad_words.bounds or ())
        self._check_ids("the prompt", self.prompt_ids)

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self.vocab_size):  # much faster than a loop over a long prompt
            return
        token = next(token for token in ids if not 0 <= token < self.vocab_size)
        raise UserError(f"{name}: expected token ids 0 <= id < {self.vocab_size}, got {token}")

    def placed(
        self, name: str, values: Collection[int] | Collection[float], like: Tensor, dtype: torch.dtype = torch.long
    ) -> Tensor:
        """Numbers of these parameters as a tensor on the device of another one, made once for all rounds."""
        key = (name, like.device, dtype)
        if key not in self._placed:
            self._placed[key] = torch.tensor(list(values), dtype=dtype, device=like.device)
        return self._placed[key]

    def fresh(self) -> Transforms:
        """The same for another continuation of the prompt."""
        return self if self.constraint is None else replace(self, constraint=self.constraint.fresh())

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """What min_tokens masks: EOS, also under ignore_eos (as vLLM), and stop_token_ids."""
        return tuple(sorted({*self.eos_token_ids, *self.params.stop_token_ids}))

    @cached_property
    def penalised(self) -> bool:
        """Whether some penalty is on."""
        params = self.params
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    @cached_property
    def path_dependent(self) -> bool:
        """Whether `probabilities` reads output_ids and paths; if not, callers need not make them."""
        early = self.params.min_tokens > 0 and bool(self.stop_ids)
        by_code = self.constraint is not None or self.processor is not None
        return self.penalised or self.bad_words.several or early or by_code

    @cached_property
    def edits(self) -> bool:
        """Whether some logit is changed before the temperature."""
        return self.path_dependent or bool(self.bad_words) or self.params.logit_bias is not None

    @cached_property
    def prompt_counts(self) -> dict[int, int]:
        """The tokens that the repetition penalty finds in the prompt, each generated 0 times."""
        return dict.fromkeys(self.prompt_ids, 0) if self.params.repetition_penalty != 1 else {}


def probabilities(
    logits: Float[Tensor, "rows vocab"],
    transforms: Transforms,
    output_ids: Sequence[int] = (),
    paths: Sequence[Sequence[int]] = (),
) -> Float[Tensor, "rows vocab"]:
    """The distribution each row's next token is drawn from; the transforms and their order are in the module docstring.

    A row's result depends on its own logits and context only, and not on how the context is split into output and path.

    Args:
        logits: of any floating dtype, checked by `check_logits`; left as they are.
        transforms: the request's.
        output_ids: tokens generated and committed so far.
        paths: for each row the drafted tokens between output_ids and that row, empty for the root's. Neither is touched
            unless `transforms.path_dependent`.

    Returns:
        float32 probabilities (float64 for float64 logits), in memory of their own.

    Raises:
        UserError: a wrong width or number of paths; a row in which every token is masked.
    """
    if logits.shape[-1] != transforms.vocab_size:
        raise ValueError(f"expected logits of width {transforms.vocab_size} (the vocabulary), got {logits.shape[-1]}")
    scores = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if transforms.edits:
        scores = scores.clone() if scores is logits else scores
        _edit(scores, transforms, output_ids, paths)
    if transforms.processor is not None:
        scores = _processed(scores, transforms.processor, output_ids, paths)
    return shaped(scores, transforms.params)


def shaped(scores: Float[Tensor, "rows width"], params: SamplingParams) -> Float[Tensor, "rows width"]:
    """What follows the edits of single logits: temperature, min-p, top-k, top-p and softmax, or argmax.

    Columns of -inf change nothing about the others, so tokens of probability 0 may be left out.

    Args:
        scores: float32 or float64, columns in the order of the tokens' ids; left as they are.
        params: the request's.
    """
    if params.temperature == 0:
        return native.greedy(scores)
    return native.softmax(_filter(_scale_by_temperature(scores, params.temperature), params))


def _edit(scores: Tensor, transforms: Transforms, output_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
    """Everything that changes single logits, in place."""
    if transforms.path_dependent and len(paths) != len(scores):
        raise ValueError(f"expected one path for each of {len(scores)} rows of logits, got {len(paths)}")
    masked = _mask(scores, transforms, output_ids, paths)
    bias = transforms.params.logit_bias
    if bias is not None:
        ids = transforms.placed("biased", bias, scores)
        scores[:, ids] += transforms.placed("bias", bias.values(), scores, scores.dtype)
    if transforms.penalised:
        _penalise(scores, transforms, output_ids, paths)
    if masked:
        _check_alive(scores, masked)


def _processed(
    scores: Float[Tensor, "rows vocab"],
    processor: ScoreProcessor,
    output_ids: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> Float[Tensor, "rows vocab"]:
    """What a caller's processor makes of the scores, checked as nobody else checks it."""
    made = processor(scores, output_ids, paths)
    _refuse_peaks(made.amax(-1).tolist(), "the target or the drafter, after the logits processors,")
    return made


def _mask(
    scores: Tensor, transforms: Transforms, output_ids: Sequence[int], paths: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """Writes -inf for bad words and for early stops; returns the names of the options that did."""
    causes = []
    if transforms.constraint is not None:
        allowed = transforms.constraint.allowed(output_ids, paths)
        scores.masked_fill_(~allowed.to(scores.device), _NEVER)
        causes.append("grammar")
    words = transforms.bad_words
    if words.single:
        scores[:, transforms.placed("banned", words.single, scores)] = _NEVER
        causes.append("bad_words")
    if words.several and _ban(scores, [words.completing(output_ids, path) for path in paths]):
        causes.append("bad_words")
    early = transforms.params.min_tokens - len(output_ids) if transforms.params.min_tokens else 0
    if early > 0 and transforms.stop_ids:
        rows = [row for row, path in enumerate(paths) if len(path) < early]
        ids = transforms.placed("stops", transforms.stop_ids, scores)
        scores[torch.tensor(rows, dtype=torch.long, device=scores.device).unsqueeze(-1), ids] = _NEVER
        causes.append("min_tokens")
    return tuple(dict.fromkeys(causes))


def _ban(scores: Tensor, tokens: Sequence[Sequence[int]]) -> bool:
    """Write -inf for some tokens of each row; whether there were any."""
    rows = [row for row, found in enumerate(tokens) for _ in found]
    if rows:
        ids = [token for found in tokens for token in found]
        scores[torch.tensor(rows, device=scores.device), torch.tensor(ids, device=scores.device)] = _NEVER
    return bool(rows)


def _penalise(
    scores: Tensor, transforms: Transforms, output_ids: Sequence[int], paths: Sequence[Sequence[int]]
) -> None:
    """Penalties in place, touching only tokens that occur: committed ones in all rows, then each row's own path.

    The path's tokens are read before the committed ones are written, so that each logit is penalised once.
    """
    params = transforms.params
    committed = transforms.prompt_counts | Counter(output_ids)
    own = [
        (row, token, committed.get(token, 0) + count)
        for row, path in enumerate(paths)
        for token, count in Counter(path).items()
    ]
    if own:
        rows, tokens, counts = torch.tensor(own, device=scores.device).unbind(-1)
        patch = _penalty(scores[rows, tokens], counts, params)
    if committed:
        ids = torch.tensor(list(committed), device=scores.device)
        scores[:, ids] = _penalty(scores[:, ids], torch.tensor(list(committed.values()), device=scores.device), params)
    if own:
        scores[rows, tokens] = patch


def _penalty(values: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    """Logits of tokens that occurred, `counts` times of them in the output, after the three penalties."""
    repetition = params.repetition_penalty
    if repetition != 1:
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values.clamp(max=torch.finfo(values.dtype).max)  # a huge logit over a small penalty
    counts = counts.to(values.dtype)
    return values - params.frequency_penalty * counts - params.presence_penalty * counts.clamp(max=1)


def _check_alive(scores: Tensor, causes: Sequence[str]) -> None:
    dead = scores.amax(-1) == _NEVER
    if dead.any():
        row = int(dead.nonzero()[0, 0])
        raise NoTokenError(f"every token of row {row} is masked by {' and '.join(causes)}: allow at least one token")


def _scale_by_temperature(scores: Tensor, temperature: float) -> Tensor:
    """Logits over temperature, less their maximum first, so that no temperature overflows."""
    if temperature == 1:
        return scores
    return (scores - scores.amax(-1, keepdim=True)).div_(min(max(temperature, _COLDEST), _HOTTEST))


def _filter(scores: Tensor, params: SamplingParams) -> Tensor:
    """min-p, top-k, top-p: -inf for what each of them leaves out of what the one before it kept."""
    if params.min_p > 0:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(params.min_p), _NEVER)
    if 0 < params.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[..., -1:], _NEVER)
    if params.top_p < 1:
        scores = _nucleus(scores, params.top_p)
    return scores


def _nucleus(scores: Float[Tensor, "rows vocab"], top_p: float, guess: int = _GUESS) -> Float[Tensor, "rows vocab"]:
    """The scores of the fewest tokens, most likely first and ties by id, whose mass reaches top_p; -inf for the others.

    Looks among the `guess` best first, then 16 times as many, and sorts all only where these do not decide: some row's
    mass is not reached, or tokens as likely as the last one kept may be missing. The answer is the same.
    """
    probs = scores.softmax(-1)
    for width in sorted({min(width, scores.shape[-1]) for width in (guess, 16 * guess, scores.shape[-1])}):
        values, ids = _best(scores, width)
        mass = probs.gather(-1, ids).cumsum(-1, dtype=torch.float64)
        kept = torch.cat([torch.ones_like(mass[:, :1], dtype=torch.bool), mass[:, :-1] < top_p], -1)
        undecided = kept & (values == values[:, -1:])
        if not bool(undecided.any()):
            break
    return torch.full_like(scores, _NEVER).scatter_(-1, ids, values.masked_fill_(~kept, _NEVER))


def _best(scores: Float[Tensor, "rows vocab"], width: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the `width` best of each row, equals in order of their ids (topk promises no order)."""
    if width == scores.shape[-1]:
        return scores.sort(descending=True, stable=True)
    ids = scores.topk(width).indices.sort().values
    values, order = scores.gather(-1, ids).sort(descending=True, stable=True)
    return values, ids.gather(-1, order)


@dataclass(frozen=True)
class TokenLogprob:
    """A token under the model's raw distribution, before any transform, or under the one it is sampled from.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability.
        rank: 1 for the most likely token; one more than the number of strictly likelier ones.
        top: the best (token id, log-probability), likeliest first, ties by id.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**self.__dict__, "top": [list(pair) for pair in self.top]}


def top_logprobs(logits: Float[Tensor, "rows vocab"], tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probability and rank of one token in each row of logits, and the `k` best tokens (or all there are)."""
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    ids = torch.tensor(list(tokens), device=logprobs.device).unsqueeze(-1)
    mine = logprobs.gather(-1, ids)
    ranks = 1 + (logprobs > mine).sum(-1)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if k:
        tops = _likeliest(logprobs, min(k, logprobs.shape[-1]))
    found = zip(tokens, mine.squeeze(-1).tolist(), ranks.tolist(), tops, strict=True)
    return [TokenLogprob(token, value, rank, top) for token, value, rank, top in found]


def _likeliest(logprobs: Float[Tensor, "rows vocab"], k: int) -> list[tuple[tuple[int, float], ...]]:
    """The `k` largest of each row, ties by id: `topk` alone may leave out the lower of two ids."""
    values, ids = logprobs.topk(min(k + 1, logprobs.shape[-1]))
    found = []
    for row, (best, tokens) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        pairs = list(zip(tokens, best, strict=True))
        if len(best) > k and best[k] == best[k - 1]:
            tied = (logprobs[row] >= best[k]).nonzero().squeeze(-1)
            pairs = list(zip(tied.tolist(), logprobs[row, tied].tolist(), strict=True))
        found.append(tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:k]))
    return found


def check_logits(logits: Float[Tensor, "*rows vocab"], what: str) -> None:
    """Refuses logits that no distribution follows from; -inf entries are allowed.

    Raises:
        UserError: `what` (whose logits they are) holds NaN or +inf, or a row has no finite value.
    """
    if native.legal(logits):
        return
    _refuse_peaks(logits.amax(-1).flatten().tolist(), what)


def _refuse_peaks(peaks: Sequence[float], what: str) -> None:
    """Refuse rows of logits by the largest entry of each, which is NaN where any entry is."""
    bad = next((peak for peak in peaks if not math.isfinite(peak)), None)
    if bad is not None:
        problem = "NaN" if math.isnan(bad) else "+inf" if bad > 0 else "no finite value"
        raise UserError(
            f"the logits of {what} hold {problem}: expected finite values or -inf, with a finite one in each row"
        )


class LogitsCheck:
    """`check_logits` for many requests: at once on a CPU, with one copy in `finish` where each look waits for a device.

    Until then an invalid row goes through the transforms and the draws like any other: its draws are token ids
    without meaning.
    """

    def __init__(self) -> None:
        self._peaks: list[tuple[int, str, Tensor]] = []

    def add(self, request_id: int, logits: Float[Tensor, "rows vocab"], what: str) -> None:
        """Check some rows of a request, now or later.

        Raises:
            RequestError: on a CPU, as `check_logits`.
        """
        if logits.device.type != "cpu":
            self._peaks.append((request_id, what, logits.amax(-1)))
        elif not native.legal(logits):
            with blamed_on(request_id):
                check_logits(logits, what)

    def clear(self) -> None:
        """Forget rows that nobody looked at, as after a round that failed."""
        self._peaks = []

    def finish(self) -> None:
        """Look at all rows that were added since the last time; waits for the device.

        Raises:
            RequestError: of the first request with an invalid row.
        """
        if not self._peaks:
            return
        added = self._peaks
        self._peaks = []
        values = iter(torch.cat([peaks for _, _, peaks in added]).tolist())
        for request_id, what, peaks in added:
            with blamed_on(request_id):
                _refuse_peaks([next(values) for _ in range(peaks.shape[0])], what)
