"""Competitors on the same weights and prompts: transformers' plain, assisted and lookup generation.

To add another engine, write an Answerer, put a function that makes it into COMPETITORS, and its name into
`cell.ENGINES`. Counts come from a hook on the target's forward pass, so a method that silently has no effect is seen:
it makes one call a token.
"""

from __future__ import annotations

import ast
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from draftproof.backends.model_info import cache_names
from draftproof.bench.cell import Cell
from draftproof.bench.model_cache import Answerer, ModelCache, Stopwatch
from draftproof.bench.questions import Question
from draftproof.bench.record import Generation
from draftproof.errors import UserError
from draftproof.progress import Watch, silent
from draftproof.sampling import SamplingParams

# The values tried in the search for the fastest setting, besides the defaults of transformers.
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "transformers-assisted": {
        "num_assistant_tokens": (2, 4, 8),
        "num_assistant_tokens_schedule": ("constant",),
        "assistant_confidence_threshold": (0.0, 0.4),
    },
    "transformers-lookup": {"prompt_lookup_num_tokens": (3, 10), "max_matching_ngram_size": (1, 2, 3)},
}
_LOOKUP_TOKENS = 10  # transformers' lookup is off without a number; this is the number in its documentation


def parse_setting(text: str) -> dict[str, Any]:
    """The options of a cell's setting: "name=value,name=value"."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"setting: expected name=value,name=value, got {part!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def format_setting(options: Mapping[str, Any]) -> str:
    """The text that `parse_setting` reads."""
    return ",".join(f"{name}={value}" for name, value in options.items())


class Transformers:
    """transformers' `generate`, batch 1, with fresh generation options.

    `method` is its name in reports, `assistant` the draft model of assisted generation, `setting` options of the
    assistant, or of lookup.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        *,
        method: str = "transformers",
        assistant: Any = None,
        setting: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._eos = list(eos_token_ids)
        self._method = method
        self._assistant = assistant
        self._setting = dict(setting or {})
        unknown = [name for name in self._setting if not hasattr(_generation_config(), name)]
        if unknown:
            raise UserError(f"transformers has no generation option {unknown[0]!r}")

    def __call__(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continue one prompt, under torch's own generator seeded by the request."""
        ids = torch.tensor([list(prompt_ids)], device=self._model.device)
        starts: list[float] = []
        with self._counted(starts) as (target, assistant), torch.random.fork_rng():
            torch.manual_seed((params.seed or 0) & 0x7FFFFFFF)
            began = time.perf_counter()
            watch = Stopwatch(ids.device)
            made = self._generate(ids, params)
            tokens = made[0, ids.shape[1] :].tolist()
            text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
            total, peak = watch.stop()
        drafted, accepted = _rounds(target, len(prompt_ids), len(tokens))
        # An assistant may draft tokens that it does not submit: its own calls count them, the target's do not.
        draft_tokens = max(len(assistant), sum(drafted))
        stopped = bool(tokens) and tokens[-1] in self._eos
        return Generation(
            token_ids=tuple(tokens),
            text=text,
            finish_reason="stop" if stopped else "length",
            method=f"{self._method} ({format_setting(self._setting)})" if self._setting else self._method,
            tokens=len(tokens),
            target_calls=len(target),
            rounds=sum(count > 0 for count in drafted),
            draft_tokens=draft_tokens,
            accepted=sum(accepted),
            accepted_per_position=_reached(accepted, drafted),
            drafted_per_position=_reached(drafted, drafted),
            seconds={"total": total},
            first_tokens=accepted[0] + 1,
            first_seconds=(starts[1] - began if len(starts) > 1 else total),  # its tokens are known then
            peak_memory=peak,
        )

    def _generate(self, ids: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        sampled = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        options: dict[str, Any] = {
            "max_new_tokens": params.max_tokens,
            "do_sample": params.temperature > 0,
            "eos_token_id": self._eos or None,
            "pad_token_id": self._eos[0] if self._eos else 0,
            **(sampled if params.temperature > 0 else {}),
        }
        extra: dict[str, Any] = {}
        if self._assistant is not None:
            # The assistant's own options are used, and a schedule changes them: every answer begins with the same ones.
            self._assistant.generation_config = _generation_config(**self._setting)
            extra["assistant_model"] = self._assistant
        else:
            options |= self._setting
        config, mask = _generation_config(**options), torch.ones_like(ids)
        made: torch.Tensor = self._model.generate(ids, attention_mask=mask, generation_config=config, **extra)
        return made

    @contextmanager
    def _counted(self, starts: list[float]) -> Iterator[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
        """Count for each forward pass of target and assistant the tokens in the cache before it and the tokens read.

        `starts` gets the times at which the target's passes begin.
        """
        calls: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        hooks = [self._model.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()))]
        for model, found in zip((self._model, self._assistant), calls, strict=True):
            if model is not None:
                hooks.append(model.register_forward_pre_hook(_counter(found), with_kwargs=True))
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()


def _generation_config(**options: Any) -> Any:
    """Only these generation options; a model's own ones may set penalties and other temperatures."""
    from transformers import GenerationConfig

    library: Any = GenerationConfig
    return library(**options)


def _counter(found: list[tuple[int, int]]) -> Callable[..., None]:
    def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
        ids: Any = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        keys = next((kwargs[name] for name in cache_names() if name in kwargs), None)
        found.append((0 if keys is None else int(keys.get_seq_length()), int(ids.shape[1])))

    return count


def _rounds(calls: Sequence[tuple[int, int]], prompt: int, tokens: int) -> tuple[list[int], list[int]]:
    """Drafted and accepted tokens of each call, from the cache before it and the number of tokens it read.

    A call reads one committed token (the first call: the prompt) and the drafted ones. The cache before the next call
    holds those of them that were accepted.
    """
    drafted = [known + read - max(known + 1, prompt) for known, read in calls]
    known = [max(before + 1, prompt) for before, _ in calls] + [prompt + tokens]
    accepted = [max(after - before - 1, 0) for before, after in itertools.pairwise(known)]
    return drafted, [min(kept, count) for kept, count in zip(accepted, drafted, strict=True)]


def _reached(lengths: Sequence[int], drafted: Sequence[int]) -> tuple[int, ...]:
    """The number of lengths that reach each position, for all positions that were drafted."""
    return tuple(sum(length > place for length in lengths) for place in range(max(drafted, default=0)))


def _assisted(cache: ModelCache, cell: Cell) -> Answerer:
    if cell.draft is None:
        raise UserError("transformers' assisted generation needs a draft model: name one with draft (--draft)")
    cache.check_same_tokenizer(cell.target, cell.draft)
    return _make(cache, cell, assistant=cache.model(cell.draft, cell.dtype))


def _make(
    cache: ModelCache, cell: Cell, setting: Mapping[str, Any] | None = None, *, assistant: Any = None
) -> Transformers:
    return Transformers(
        cache.model(cell.target, cell.dtype),
        cache.tokenizer(cell.target),
        cache.plain_engine(cell).eos_token_ids,
        method=cell.engine,
        assistant=assistant,
        setting={**(setting or {}), **parse_setting(cell.setting)},
    )


COMPETITORS: dict[str, Callable[[ModelCache, Cell], Answerer]] = {
    "transformers": _make,
    "transformers-assisted": _assisted,
    "transformers-lookup": partial(_make, setting={"prompt_lookup_num_tokens": _LOOKUP_TOKENS}),
}


def search(cache: ModelCache, cell: Cell, questions: Sequence[Question], *, watch: Watch = silent) -> dict[str, float]:
    """Tokens a second of a competitor under each setting of its grid ("": the defaults), the median over questions.

    The settings take turns on each question.
    """
    grid = GRIDS.get(cell.engine, {})
    settings = ["", *(format_setting(dict(zip(grid, v, strict=True))) for v in itertools.product(*grid.values()))]
    tried = [replace(cell, setting=setting) for setting in dict.fromkeys(settings)]
    rates: dict[str, list[float]] = {one.setting: [] for one in tried}
    with watch(f"trying settings of {cell.engine}", len(tried) * len(questions), 0) as tick:
        for place, question in enumerate(questions):
            prompt = cache.encode(cell, question)
            if place == 0:
                COMPETITORS[cell.engine](cache, cell)(prompt, cell.params)  # warms up
            for number, one in enumerate(tried, 1):
                answer = COMPETITORS[one.engine](cache, one)(prompt, one.params)
                rates[one.setting].append(answer.tokens / answer.seconds["total"])
                tick(place * len(tried) + number, tokens=answer.tokens)
    return {setting: median(found) for setting, found in rates.items()}
