"""Responses that the engine samples from a model, kept on disk.

Each batch of prompts has one file, which is written whole or not at all, and the seed of a request depends on its
number only. So an interrupted run can be continued, with the same responses as without an interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from draftproof.engine.engine import Engine
from draftproof.files import remembered
from draftproof.progress import Watch, silent
from draftproof.provenance import digest
from draftproof.rng import fold
from draftproof.sampling import SamplingParams


@dataclass(frozen=True)
class Response:
    """Token ids of a prompt and of the model's continuation."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def whole(self) -> list[int]:
        """Prompt and continuation."""
        return [*self.prompt, *self.tokens]


def instruction_ids(engine: Engine, text: str) -> list[int]:
    """Token ids of a user's message, in the chat template if there is one."""
    chat = getattr(engine.tokenizer, "chat_template", None)
    return engine.encode([{"role": "user", "content": text}] if chat else text)[1]


def sample_responses(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    cache: Path,
    key: str,
    seed: int = 0,
    watch: Watch = silent,
    title: str = "sampling responses",
) -> list[Response]:
    """One continuation of each prompt, from the cache where it is there; each batch of the engine is one file.

    With or without speculation the distribution is the same. The seed of `params` is replaced by one for each prompt.
    `key` identifies the model (by its fingerprint) and how it is run.
    """
    rows = [list(prompt) for prompt in prompts]
    size = engine.max_batch
    folder = cache / "responses" / digest(key, _deciding(params), seed, rows, size)[:24]
    found: list[Response] = []
    starts = range(0, len(rows), size)
    with watch(title, len(starts), 0) as tick:
        for number, start in enumerate(starts):
            file = folder / f"{number:06d}.json"
            batch = rows[start : start + size]
            fresh = not file.exists()
            made = remembered(file, partial(_sample, engine, batch, params, seed, start))
            found += [Response(tuple(row), tuple(tokens)) for row, tokens in zip(batch, made, strict=True)]
            tick(number + 1, tokens=sum(map(len, made)) if fresh else 0)
    return found


def _sample(engine: Engine, prompts: list[list[int]], params: SamplingParams, seed: int, first: int) -> list[list[int]]:
    each = [replace(params, n=1, seed=fold(seed, first + place) >> 1) for place in range(len(prompts))]
    return [list(output.token_ids) for output in engine.generate(prompts, each)]


def _deciding(params: SamplingParams) -> dict[str, object]:
    """The parameters on which the responses depend."""
    found = asdict(params)
    del found["seed"], found["n"]
    return found
