"""Responses sampled from a model by our own engine, kept on disk and continued after a kill.

Knows: batches of prompts, one file for each. Does not know: what responses are used for.

A batch's file appears whole or not at all, and every request is seeded by its number: a cache that a kill left half
made is completed to the one that would have been made at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from draftproof.engine.engine import Engine
from draftproof.files import whole_file
from draftproof.progress import Watch, silent
from draftproof.provenance import digest
from draftproof.rng import fold
from draftproof.sampling import SamplingParams


@dataclass(frozen=True)
class Response:
    """Token ids of a prompt and of what the model made of it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def whole(self) -> list[int]:
        """Prompt and continuation."""
        return [*self.prompt, *self.tokens]


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
    """One continuation of each prompt, from the cache as far as it is there.

    Args:
        engine: over the model whose responses are wanted; speculative or not, the law is the same. What it decodes
            together is written together.
        prompts: token ids.
        params: how they are continued; its seed is replaced by one for each prompt.
        cache: folder of the cache.
        key: names the model (its fingerprint) and how it is run.
        seed: of all draws.
        watch: shows progress.
        title: what the progress bar says.
    """
    asked = [list(prompt) for prompt in prompts]
    size = engine.max_batch
    folder = cache / "responses" / digest(key, _told(params), seed, asked, size)[:24]
    found: list[Response] = []
    starts = range(0, len(asked), size)
    with watch(title, len(starts), 0) as tick:
        for number, start in enumerate(starts):
            file = folder / f"{number:06d}.json"
            batch = asked[start : start + size]
            fresh = not file.exists()
            if fresh:
                with whole_file(file) as work:
                    work.write_text(json.dumps(_sample(engine, batch, params, seed, start)), encoding="utf-8")
            made = json.loads(file.read_text(encoding="utf-8"))
            found += [Response(tuple(row), tuple(tokens)) for row, tokens in zip(batch, made, strict=True)]
            tick(number + 1, tokens=sum(map(len, made)) if fresh else 0)
    return found


def _sample(engine: Engine, prompts: list[list[int]], params: SamplingParams, seed: int, first: int) -> list[list[int]]:
    each = [replace(params, n=1, seed=fold(seed, first + place) >> 1) for place in range(len(prompts))]
    return [list(output.token_ids) for output in engine.generate(prompts, each)]


def _told(params: SamplingParams) -> dict[str, object]:
    """What of the parameters decides the responses."""
    told = asdict(params)
    del told["seed"], told["n"]
    return told
