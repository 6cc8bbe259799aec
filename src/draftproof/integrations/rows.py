"""The rows of a batch of transformers' generate as requests of the engine, and their tokens as one padded tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.backends.base import why_bounded
from draftproof.engine.engine import Engine
from draftproof.engine.request import Request
from draftproof.engine.stats import Stats, total_stats
from draftproof.errors import UserError
from draftproof.finish import Cutter, Finish
from draftproof.integrations.processors import ProcessedParams, Processors, as_params
from draftproof.rng import fold
from draftproof.sampling import SamplingParams


@dataclass(frozen=True)
class Ends:
    """Where rows end: at a number of tokens, padding and prompt included, at EOS, or where a criterion says so."""

    max_length: int
    eos: tuple[int, ...]
    criteria: tuple[Any, ...]

    @classmethod
    def of(cls, criteria: Sequence[Any], batch: int) -> Ends:
        """From transformers' prepared stopping criteria; a UserError for those that cannot be called row by row."""
        lengths, eos, others = [], [], []
        for each in criteria:
            kind = type(each).__name__
            if kind == "MaxLengthCriteria":
                lengths.append(int(each.max_length))
            elif kind == "EosTokenCriteria":
                eos += each.eos_token_id.reshape(-1).tolist()
            elif kind == "ConfidenceCriteria":
                raise UserError("stopping criterion ConfidenceCriteria is of assisted generation: leave it out")
            else:
                others.append(each)
        if others and not eos and batch > 1:
            raise UserError(
                f"stopping criterion {type(others[0]).__name__} in a batch of {batch} without eos_token_id: "
                "transformers then goes on with a row that has ended until the last one has. Set eos_token_id, or "
                "generate for one row at a time"
            )
        if not lengths:
            raise UserError("no length limit: set max_new_tokens")
        return cls(min(lengths), tuple(dict.fromkeys(eos)), tuple(others))


class CriteriaCutter(Cutter):
    """A cutter that also asks stopping criteria after every token, with input_ids [1, length] and no scores."""

    def __init__(
        self, params: SamplingParams, criteria: Sequence[Any], prefix: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(params)
        self._criteria = criteria
        self._ids = list(prefix)
        self._device = device

    def _push(self, token: int) -> None:
        super()._push(token)
        self._ids.append(token)
        ids = torch.tensor([self._ids], device=self._device)
        done = [bool(torch.as_tensor(each(ids, None)).any()) for each in self._criteria]  # each may keep a clock
        if any(done) and self.finish is None:
            self._end(Finish.STOP, None)


def prompts_of(
    input_ids: Int[Tensor, "rows length"], mask: Int[Tensor, "rows length"] | None, positions: Tensor | None
) -> list[list[int]]:
    """The tokens of each row without its padding, which must stand on the left."""
    rows: list[list[int]] = input_ids.tolist()
    if mask is None:
        pads = [0] * len(rows)
    else:
        if mask.shape != input_ids.shape:
            raise UserError(
                f"attention_mask: expected the shape of input_ids, {list(input_ids.shape)}, got {list(mask.shape)} (a "
                "mask that covers a cache of earlier tokens cannot be used: the engine has its own cache)"
            )
        on = mask.bool()
        pads = (~on).sum(-1).tolist()
        for row, pad in enumerate(pads):
            if not bool(on[row, pad:].all()) or pad == len(rows[row]):
                raise UserError(
                    f"attention_mask of row {row} is not padding on the left of at least one token: tokenize with "
                    "padding_side='left'"
                )
    _check_positions(positions, pads, len(rows[0]) if rows else 0)
    return [row[pad:] for row, pad in zip(rows, pads, strict=True)]


def _check_positions(positions: Tensor | None, pads: Sequence[int], width: int) -> None:
    if positions is None:
        return
    found = positions.expand(len(pads), -1).tolist() if positions.dim() == 2 else None
    for row, pad in enumerate(pads):
        if found is None or found[row][pad:] != list(range(width - pad)):
            raise UserError(
                f"position_ids of row {row} are not 0, 1, 2, ... from its first token on: the engine counts positions "
                "itself; leave them out"
            )


def params_of(
    processors: Any, prompts: Sequence[Sequence[int]], input_ids: Tensor, ends: Ends, *, do_sample: bool
) -> list[SamplingParams]:
    """The sampling parameters of each row, from transformers' prepared processors."""
    batch, width = input_ids.shape
    most = ends.max_length - width
    common: dict[str, Any] = {"max_tokens": most, "ignore_eos": True, "stop_token_ids": ends.eos}
    seed = int(torch.randint(1 << 62, ())) if do_sample else 0
    padding = [width - len(prompt) for prompt in prompts]
    given = as_params(processors, width=width, padding=padding, eos=ends.eos)
    made: list[SamplingParams] = []
    for row, ids in enumerate(input_ids.tolist()):
        common["seed"] = fold(seed, row) >> 2
        if given is None:
            own = Processors(processors, ids, row=row, batch=batch, device=input_ids.device)
            made.append(ProcessedParams(**common, temperature=1.0 if do_sample else 0.0, processor=own))
        else:
            least = min(given.get("min_tokens", 0), most)
            shape = {**given, "min_tokens": least} | ({} if do_sample else {"temperature": 0.0})
            made.append(SamplingParams(**{**common, **shape}))
    return made


class Rows:
    """The rows of one call while they are decoded, in an engine that nobody else uses meanwhile."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        input_ids: Int[Tensor, "rows length"],
        ends: Ends,
        pad: int | None,
    ) -> None:
        self._engine = engine
        self._input_ids = input_ids
        self._pad = pad
        _refuse_too_long(engine, prompts, ends.max_length - input_ids.shape[1])
        self._requests: list[Request] = []
        try:
            for row, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                (request,) = engine.add(prompt, own)
                self._requests.append(request)
                if ends.criteria:
                    prefix = input_ids[row].tolist()
                    request.cutter = CriteriaCutter(own, ends.criteria, prefix, input_ids.device)
        except BaseException:
            self._abort()
            raise

    def columns(self) -> Iterator[Int[Tensor, " rows"]]:
        """The new tokens of all rows, one place after another, as soon as every row has come that far."""
        place = 0
        try:
            while True:
                ids = [request.output_ids for request in self._requests]
                ready = [len(each) for each, request in zip(ids, self._requests, strict=True) if not request.finished]
                least = min(ready, default=max(map(len, ids)))
                for now in range(place, least):
                    yield torch.tensor([self._at(each, now) for each in ids], device=self._input_ids.device)
                place = max(place, least)
                if not ready:
                    return
                self._engine.step()
                for row, request in enumerate(self._requests):
                    if request.error is not None:
                        why = str(request.error).partition("failed: ")[2]
                        raise UserError(f"row {row} of the batch failed: {why}") from request.error
        finally:
            self._abort()

    @property
    def stats(self) -> Stats:
        """Counts and times of all rows; each row of a batch counts the whole time of a round."""
        return total_stats(request.stats for request in self._requests)

    def _at(self, ids: Sequence[int], place: int) -> int:
        if place < len(ids):
            return ids[place]
        if self._pad is None:
            raise UserError("a row ended before another, and there is no pad_token_id: set one")
        return self._pad

    def _abort(self) -> None:
        for request in self._requests:
            self._engine.abort(request)


def _refuse_too_long(engine: Engine, prompts: Sequence[Sequence[int]], most: int) -> None:
    """Refuse a length that the engine would cut, which transformers does not."""
    reads = engine.target.max_positions
    if reads is None:
        return
    spare = engine.drafter.limit if engine.verifier.constant_length else 0
    longest = max(map(len, prompts))
    if longest + most + spare > reads:
        why = why_bounded(engine.target) or "its max_position_embeddings"
        kept = f", of which rule {engine.verifier.name} needs {spare} for drafts" if spare else ""
        raise UserError(
            f"max_new_tokens: expected at most {max(reads - longest - spare, 0)}, got {most} after a prompt of "
            f"{longest} tokens: {engine.target.name} reads up to {reads} positions ({why}){kept}"
        )
