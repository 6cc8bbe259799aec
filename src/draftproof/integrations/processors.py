"""transformers' logits processors in the engine: sampling parameters where they mean the same, else called as they are.

A processor is called with scores and the tokens before them, for every drafted context. So it must be a function of
these two: one that counts its calls, or keeps what it saw, would see drafts that were never accepted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from draftproof.errors import UserError
from draftproof.sampling import SamplingParams, ScoreProcessor, Transforms

_STATEFUL = (  # those of transformers that keep something from call to call
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WhisperNoSpeechDetection",
)
_ROW_BY_ROW = {  # those of transformers that treat all rows alike, so that contexts of one length are one call
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper", "TopPLogitsWarper",
    "TopKLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor",
    "ExponentialDecayLengthPenalty", "LogitNormalization", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
}  # fmt: skip
_WARPERS = {"TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p", "MinPLogitsWarper": "min_p"}
_ORDER = ("repetition_penalty", "min_tokens", "temperature", "top_k", "top_p", "min_p", "")


def refuse_stateful(processors: Sequence[Any]) -> None:
    """Refuse processors that keep a state."""
    for each in processors:
        name = next((kind.__name__ for kind in type(each).__mro__ if kind.__name__ in _STATEFUL), None)
        if name is not None:
            raise UserError(
                f"logits processor {name} keeps a state from call to call, which drafts that are refused would change: "
                "leave it out, or generate without custom_generate"
            )


def as_params(
    processors: Sequence[Any], *, width: int, padding: Sequence[int], eos: Sequence[int]
) -> dict[str, Any] | None:
    """The sampling parameters that mean what these processors do in this order; None where there are none."""
    given: dict[str, Any] = {}
    place = 0
    for each in processors:
        found = _one(each, width=width, padding=padding, eos=eos)
        if found is None:
            return None
        name, value = found
        now = _ORDER.index(name)
        if now < place or (name in given and name != "min_tokens"):
            return None
        place = now
        if name:
            given[name] = max(value, given.get(name, 0)) if name == "min_tokens" else value
    if given.get("min_p", 0) > 0 and given.get("top_p", 1) < 1:  # here min_p is applied first, there last
        return None
    try:
        SamplingParams(**{**given, "max_tokens": None})
    except UserError:  # out of our range, and not of transformers'
        return None
    return given


def _one(processor: Any, *, width: int, padding: Sequence[int], eos: Sequence[int]) -> tuple[str, Any] | None:
    """Name and value of the sampling parameter that one processor is; an empty name for one that changes nothing."""
    kind = type(processor).__name__
    if not type(processor).__module__.startswith("transformers."):
        return None
    name, value, usual = "", None, kind == "LogitNormalization"
    if kind in _WARPERS:
        name, value = _WARPERS[kind], getattr(processor, _WARPERS[kind])
        usual = processor.min_tokens_to_keep == 1 and processor.filter_value == -float("inf")
    elif kind == "TemperatureLogitsWarper":
        name, value, usual = "temperature", processor.temperature, True
    elif kind == "RepetitionPenaltyLogitsProcessor":
        name, value, skipped = "repetition_penalty", processor.penalty, processor.prompt_ignore_length
        usual = not any(padding) if skipped is None else _same(skipped, padding)
    elif kind == "MinLengthLogitsProcessor":
        name, value, usual = "min_tokens", max(processor.min_length - width, 0), _same(processor.eos_token_id, eos)
    elif kind == "MinNewTokensLengthLogitsProcessor":
        name, value = "min_tokens", processor.min_new_tokens
        usual = _same(processor.eos_token_id, eos) and processor.prompt_length_to_skip == width
    return (name, value) if usual else None


def _same(found: Any, expected: Sequence[int]) -> bool:
    return isinstance(found, Tensor) and found.reshape(-1).tolist() == list(expected)


@no_type_check  # as the class it extends
@dataclass(frozen=True, kw_only=True)
class ProcessedParams(SamplingParams):
    """Sampling parameters of a request whose scores go through logits processors."""

    processor: Any = None

    @override
    def bind(self, **context: Any) -> Transforms:
        return replace(super().bind(**context), processor=self.processor)


class Processors(ScoreProcessor):
    """Logits processors as the engine calls them for one request.

    `prefix` is the row before its first new token, padding included; `row` its number in the batch.
    """

    def __init__(self, processors: Any, prefix: Sequence[int], *, row: int, batch: int, device: torch.device) -> None:
        self._processors = processors
        self._prefix = list(prefix)
        self._device = device
        self._row = row
        self._batch = batch
        self._alike = batch == 1 or all(
            type(each).__name__ in _ROW_BY_ROW and type(each).__module__.startswith("transformers.")
            for each in processors
        )

    @override
    def __call__(
        self, scores: Float[Tensor, "rows vocab"], output_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Float[Tensor, "rows vocab"]:
        """Run the processors on each row, except on contexts that the scores above exclude: none expects those."""
        made = scores.clone()
        reached: dict[tuple[int, ...], int] = {}
        before = [*self._prefix, *output_ids]
        by_depth: dict[int, list[int]] = defaultdict(list)
        for row, path in enumerate(paths):
            by_depth[len(path)].append(row)
        for _, rows in sorted(by_depth.items()):
            possible = [row for row in rows if self._possible(tuple(paths[row]), reached, made, len(paths))]
            if possible:
                ids = torch.tensor([[*before, *paths[row]] for row in possible], device=self._device)
                made[possible] = self._scored(ids, scores[possible]).to(made)
                reached |= {tuple(paths[row]): row for row in possible}
        return made

    def _possible(self, path: tuple[int, ...], reached: dict[tuple[int, ...], int], made: Tensor, rows: int) -> bool:
        """Whether the scores above a context give its last token any probability; assumed where they are not here."""
        if not path or rows == 1:
            return True
        above = reached.get(path[:-1])
        if above is None:
            return not reached
        return float(made[above, path[-1]]) != -float("inf")

    def _scored(self, ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows vocab"]) -> Tensor:
        if self._alike:
            result: Tensor = self._processors(ids, scores)
            return result
        own = []
        for row in range(ids.shape[0]):  # in a batch of its size, so that each processor finds the row at its place
            wide = self._processors(
                ids[row].expand(self._batch, -1).clone(), scores[row].expand(self._batch, -1).clone()
            )
            own.append(wide[self._row])
        return torch.stack(own)
