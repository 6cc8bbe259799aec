"""Verification rules on tensors as vLLM has them: the rows of all requests one after another. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.accelerator import to_device
from draftproof.functional import block_verify, match_verify, token_verify
from draftproof.rng import Rng, inverse_cdf

RULES = {"token": token_verify, "block": block_verify, "gumbel": match_verify}
"""The rules by name; `gumbel` is match verification with an rng whose noise is keyed by seed and place."""

NONE = -1  # fills the rows of the output, and stands for a drafted token that vLLM wants to be refused
_TOGETHER = 1 << 26  # entries of padded rows of p that are made at once: 256 MiB


class GeneratorRng:
    """An Rng that honours the torch generators of requests with a seed; other rows use torch's global generator.

    A request with a generator takes from it one number for each of its own drafted tokens and one for its last token,
    whoever is in the batch. A request without drafts takes none.
    """

    def __init__(self, generators: Mapping[int, torch.Generator], lengths: Sequence[int]) -> None:
        self._own = {row: generator for row, generator in generators.items() if lengths[row]}
        self._lengths = lengths

    def _uniforms(self, shape: torch.Size, device: torch.device) -> Float[Tensor, "*shape"]:
        made = torch.rand(shape, dtype=torch.float64, device=device)
        for row, generator in self._own.items():
            own = made[row, : self._lengths[row]] if made.ndim > 1 else made[row : row + 1]
            own.uniform_(generator=generator)
        return made

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """True with the given probabilities; never for 0 and always for 1."""
        return self._uniforms(prob.shape, prob.device) < prob

    def categorical(self, weights: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
        """Inverse-CDF draws, one uniform for each row of weights."""
        return inverse_cdf(weights, self._uniforms(weights.shape[:-1], weights.device))


def verify_rows(
    rule: str,
    tokens: Int[Tensor, " drafted"],
    counts: Sequence[int],
    q: Float[Tensor, "drafted vocab"] | None,
    p: Float[Tensor, "drafted vocab"],
    last: Int[Tensor, " requests"],
    *,
    rng: Callable[[slice], Rng],
    greedy: Bool[Tensor, " requests"] | None = None,
) -> Int[Tensor, "requests width"]:
    """What each request emits: its accepted tokens and one more, then -1.

    The token after a fully accepted draft is drawn by vLLM before the rule runs. So the row of p behind each draft is
    given to the rule as a point mass on this token.

    Args:
        rule: a name in `RULES`.
        tokens: drafted token ids of all requests, one request after another. An id of -1 ends its request's draft.
        counts: number of drafted tokens of each request, 0 included.
        q: the distribution each token was drawn from; None for point masses. Rows of greedy requests are not read.
        p: the target's distribution before each drafted token, with temperature, top_k and top_p applied.
        last: token ids that were drawn from the target's distribution after each whole draft.
        rng: gives the Rng of a range of requests, with a row for each. For `gumbel` it is a `draftproof.rng.NoiseRng`.
        greedy: requests at temperature 0: their most likely token counts as the only one. None for none.

    Returns:
        Token ids, as wide as the longest draft and one more.
    """
    lengths = to_device(counts, p.device, torch.int64)
    if greedy is not None:
        each = torch.repeat_interleave(greedy, lengths, output_size=p.shape[0]).unsqueeze(-1)
        p = torch.where(each, _point_masses(p.argmax(-1), p), p)
        q = None if q is None else torch.where(each, _point_masses(tokens, p), q)
    width, found, start = max(counts, default=0), [], 0
    for part in _request_ranges(len(counts), (width + 1) * p.shape[-1]):
        size = sum(counts[part])
        rows = slice(start, start + size)
        batch = _Batch(tokens[rows], counts[part], None if q is None else q[rows], p[rows], last[part], width)
        found.append(_verify(rule, batch, rng(part)))
        start += size
    return torch.cat(found) if found else last.new_empty(0, width + 1, dtype=torch.int64)


class _Batch(NamedTuple):
    """Arguments of `verify_rows` for requests that are verified together, and the width of all drafts."""

    tokens: Int[Tensor, " drafted"]
    counts: Sequence[int]
    q: Float[Tensor, "drafted vocab"] | None
    p: Float[Tensor, "drafted vocab"]
    last: Int[Tensor, " requests"]
    width: int


def _request_ranges(requests: int, entries: int) -> Iterator[slice]:
    """Ranges of requests whose padded rows, of so many entries each, take about 256 MiB at most."""
    size = max(_TOGETHER // entries, 1)
    return (slice(start, min(start + size, requests)) for start in range(0, requests, size))


def _verify(rule: str, batch: _Batch, rng: Rng) -> Int[Tensor, "requests width"]:
    counts, width, device = batch.counts, batch.width, batch.p.device
    lengths = to_device(counts, device, torch.int64)
    given = _padded(batch.tokens.long(), counts, width)
    drafted = given.clamp(min=0)
    p = _padded(batch.p, counts, width + 1)
    p[torch.arange(len(counts), device=device), lengths] = _point_masses(batch.last, batch.p)
    found = RULES[rule](
        drafted,
        None if batch.q is None else _positive(_padded(batch.q, counts, width), drafted),
        p,
        rng=rng,
        lengths=torch.minimum((given != NONE).long().cumprod(-1).sum(-1), lengths),
        validate=False,
    )
    return emitted(drafted, found.accepted, found.token)


def emitted(
    tokens: Int[Tensor, "requests width"], accepted: Int[Tensor, " requests"], token: Int[Tensor, " requests"]
) -> Int[Tensor, "requests width+1"]:
    """The accepted tokens of each row, its last token, then -1."""
    place = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    kept = torch.cat([tokens, token.unsqueeze(-1)], -1).masked_fill(place > accepted.unsqueeze(-1), NONE)
    return torch.where(place == accepted.unsqueeze(-1), token.unsqueeze(-1), kept)


def _point_masses(tokens: Int[Tensor, " rows"], like: Float[Tensor, "any vocab"]) -> Float[Tensor, "rows vocab"]:
    made = like.new_zeros(tokens.shape[0], like.shape[-1])
    return made.scatter_(-1, tokens.long().clamp(min=0).unsqueeze(-1), 1)


def _padded(flat: Tensor, counts: Sequence[int], width: int) -> Tensor:
    """Rows of requests one after another as [requests, width, ...], filled with zeros; no wait for the device."""
    made = flat.new_zeros(len(counts) * width, *flat.shape[1:])
    places = [request * width + place for request, count in enumerate(counts) for place in range(count)]
    made[to_device(places, flat.device, torch.int64)] = flat
    return made.view(len(counts), width, *flat.shape[1:])


def _positive(q: Float[Tensor, "B n V"], drafted: Int[Tensor, "B n"]) -> Float[Tensor, "B n V"]:
    """q with a positive probability of each drafted token: padding has none, and q may have been rounded to 0."""
    index = drafted.unsqueeze(-1)
    tiny = torch.finfo(q.dtype).tiny
    return q.scatter_(-1, index, q.gather(-1, index).clamp_(min=tiny))


def matched_rows(
    drawn: Int[Tensor, " rows"], drafted: Int[Tensor, " rows"], bounds: Int[Tensor, " bounds"], width: int
) -> tuple[Int[Tensor, "requests width"], Int[Tensor, " requests"]]:
    """Match verification in the layout of vLLM's second model runner, without a wait for the device.

    Args:
        drawn: the target's own token of each row; a request has one row more than drafted tokens.
        drafted: the token that each row has read; the first row of a request has read its last committed token.
        bounds: where the rows of each request begin, and where the last ones end.
        width: tokens of the longest draft, plus one.

    Returns:
        The tokens of each request, of which those after its number of tokens mean nothing, and this number.
    """
    rows = bounds[:-1, None].long() + torch.arange(width, device=bounds.device)
    within = rows < bounds[1:, None]
    rows = rows.clamp(max=drawn.shape[0] - 1)
    tokens = drawn.long()[rows]
    same = within[:, 1:] & (tokens[:, :-1] == drafted.long()[rows][:, 1:])
    return tokens, (same.long().cumprod(-1).sum(-1) + 1).to(torch.int32)
