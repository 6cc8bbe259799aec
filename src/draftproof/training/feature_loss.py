"""The loss of a feature head along known tokens, over several steps on its own states, and its expected acceptance.

Step 1 reads the target's states at every position. Step k reads the states that step k - 1 computed, and its attention
is that of a draft: to the keys and values of step 1 up to the start of the draft, and from there to its own (EAGLE-3,
arXiv 2503.01840, calls this training-time test). So the k-th drafted token is trained on the inputs it will have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention, smooth_l1_loss

from draftproof.backends.heads.feature_net import FeatureNet
from draftproof.training.eagle3_net import Eagle3Module
from draftproof.training.feature_rows import StateRows
from draftproof.training.loop import Loss

Net = FeatureNet | Eagle3Module
_CHUNK = 64  # number of rows of logits that are processed at once, so that they fit into the caches


@dataclass(frozen=True, eq=False)
class Frame:
    """The parts of the target and the options of the loss, which are fixed while a head is trained."""

    embed: Any  # the target's embedding, as a module
    output: Float[Tensor, "ids dim"]  # the rows of the target's output layer for the head's tokens
    unroll: int = 3  # number of steps; the first reads the target's states, the others the head's own
    tv: float = 0.0  # weight of the total variation, in addition to the cross-entropy
    states: float = 0.0  # weight of the smooth L1 distance to the target's states
    autocast: bool = True  # whether matrix products are computed in bfloat16


class _Unrolled:
    """The attention of one training pass: keys and values of earlier steps are kept, and shifted to their positions."""

    def __init__(self, length: int, window: int, device: torch.device, first: int = 0) -> None:
        self._places = torch.arange(length, device=device)
        self._window = window
        self._first = first
        self._seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        groups = queries.shape[1] // keys.shape[1]
        self._seen.append((keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)))
        back = len(self._seen) - 1
        gap = self._places.unsqueeze(1) - self._places
        allowed = (gap >= back) & (gap < self._window) & (self._places >= self._first)
        allowed |= ~allowed.any(-1, keepdim=True) & (self._places == 0)  # so that no row of the softmax is empty
        first_keys, first_values = self._seen[0]
        if not back:
            return scaled_dot_product_attention(queries, first_keys, first_values, attn_mask=allowed)
        scale = queries.shape[-1] ** -0.5
        scores = (queries @ first_keys.transpose(-1, -2)).float().masked_fill(~allowed, float("-inf"))
        own = [(_shift(k, back - i), _shift(v, back - i)) for i, (k, v) in enumerate(self._seen[1:], 1)]
        extra = torch.stack([(queries * k).sum(-1).float() for k, _ in own], -1)
        weights = (torch.cat([scores, extra], -1) * scale).softmax(-1).to(first_values.dtype)
        mixed: Tensor = weights[..., : -len(own)] @ first_values
        for i, (_, v) in enumerate(own):
            mixed = mixed + weights[..., i - len(own)].unsqueeze(-1) * v
        return mixed


def _shift(x: Float[Tensor, "*batch width dim"], by: int) -> Float[Tensor, "*batch width dim"]:
    """Every entry moved `by` positions to the right, with zeros before."""
    return pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


def steps(net: Net, rows: StateRows, frame: Frame, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step the output states [rows, length, dim], and whether each position counts [rows, length]."""
    length = rows.ids.shape[1]
    attend = _Unrolled(length, net.config.window, rows.ids.device, net.first_place)
    places = torch.arange(length, device=rows.ids.device)
    rotary = net.rotary(places.unsqueeze(0))
    states, ids = net.entered(rows.states, rows.features), rows.ids
    for step in range(count):
        embedded = frame.embed(ids).to(rows.states.dtype)
        out = net(_shift(states, 1), embedded, rotary, attend)
        yield out, rows.counts & (places >= step + net.first_place)
        states, ids = net.carried(out, rows.ids)


class _OutputLoss(torch.autograd.Function):
    """An output layer and its loss in one function; the forward pass overwrites the logits with the gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, target: Tensor, tv: float) -> tuple[Tensor, Tensor]:
        rows = states.to(weight.dtype)
        logits = rows @ weight.T
        losses, overlaps = [], []
        for part, p in zip(torch.split(logits, _CHUNK), torch.split(target, _CHUNK), strict=True):
            loss, overlap, gradient = _loss_of(part, p, tv)
            losses.append(loss)
            overlaps.append(overlap)
            part.copy_(gradient)
        for_states, for_weight = ctx.needs_input_grad[:2]
        back = (logits @ weight).to(states.dtype) if for_states else None
        layer = (logits.T @ rows).float() if for_weight else None
        ctx.kept = (back, layer, states.shape[0])
        shared = torch.cat(overlaps)
        ctx.mark_non_differentiable(shared)
        return torch.cat(losses).mean(), shared

    @staticmethod
    def backward(ctx: Any, given: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        back, layer, rows = ctx.kept
        scale = given / rows
        return None if back is None else back * scale, None if layer is None else layer * scale, None, None


def _loss_of(logits: Tensor, target: Tensor, tv: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and overlap of each row, and the gradient of the loss by the logits."""
    full = logits.float()
    log_mass = full.logsumexp(-1, keepdim=True)
    covered = target.sum(-1, keepdim=True)
    loss = (covered * log_mass).squeeze(-1) - (target * full).sum(-1)
    q = full.sub_(log_mass).exp_()
    overlap = torch.minimum(q, target).sum(-1)
    if tv:
        short = q * (q < target)  # where a larger q gives a larger overlap
        weights = covered + tv * short.sum(-1, keepdim=True)
        gradient = q.mul_(weights).sub_(target).sub_(short, alpha=tv)
    else:
        gradient = q.mul_(covered).sub_(target)
    return loss + tv * (1 - overlap), overlap, gradient


def output_loss(
    states: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "ids dim"],
    target: Float[Tensor, "rows ids"],
    tv: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, " rows"]]:
    """The mean loss of rows, cross-entropy plus `tv` times total variation, and the overlap sum of min(p, q) of each.

    Products are computed in the dtype of `weight`, an output layer whose softmax is q. Rows of `target` sum to 1 or
    less.
    """
    found: tuple[Tensor, Tensor] = _OutputLoss.apply(states, weight, target, tv)  # type: ignore[no-untyped-call]
    return found


def target_rows(rows: StateRows, frame: Frame) -> Float[Tensor, "positions ids"]:
    """The target's probabilities of the head's tokens at every position."""
    logits = linear(rows.states.flatten(0, 1).to(frame.output.dtype), frame.output).float()
    return logits.sub_(rows.log_mass.flatten().unsqueeze(-1)).exp_()


def feature_loss(net: Net, rows: StateRows, frame: Frame) -> Loss:
    """The mean loss of all unrolled steps on a batch."""
    with torch.no_grad():
        target = target_rows(rows, frame)
    total = torch.zeros((), device=rows.ids.device)
    with torch.autocast(rows.ids.device.type, torch.bfloat16, enabled=frame.autocast):
        for out, counts in steps(net, rows, frame, frame.unroll):
            index = counts.flatten().nonzero().squeeze(-1)
            chosen = net.predicted(out.flatten(0, 1)[index])
            total = total + output_loss(chosen, _weight(net, frame), target[index], frame.tv)[0]
            if frame.states:
                given = rows.states.flatten(0, 1)[index].to(chosen.dtype)
                total = total + frame.states * smooth_l1_loss(chosen, given)
    return Loss(total / frame.unroll, int(rows.counts.sum()))


def _weight(net: Net, frame: Frame) -> Float[Tensor, "ids dim"]:
    """The output layer in use, in the dtype of the matrix products."""
    weight: Tensor = frame.output if net.output is None else net.output.weight
    return weight.to(torch.bfloat16 if frame.autocast else torch.float32)


@torch.no_grad()
def acceptance(net: Net, rows: StateRows, frame: Frame, positions: int = 4) -> dict[str, float]:
    """Expected acceptance, 1 - TV at temperature 1, of each drafted position along known tokens.

    Returns:
        "accept_1", "accept_2", ...: the acceptance of each position; "covered": the share of the target's mass on the
        head's tokens; "top_1": how often the most likely first token is the same as the target's.
    """
    sums: dict[str, list[Tensor]] = {}
    for first in range(0, rows.ids.shape[0], 4):
        part = rows.pick(range(first, min(first + 4, rows.ids.shape[0])))
        with torch.autocast(rows.ids.device.type, torch.bfloat16, enabled=frame.autocast):
            for name, values in _figures(net, part, frame, positions):
                sums.setdefault(name, []).append(values)
    return {name: float(torch.cat(values).mean()) for name, values in sums.items()}


def _figures(net: Net, rows: StateRows, frame: Frame, positions: int) -> Iterator[tuple[str, Tensor]]:
    """The figures of `acceptance` at every position of some rows."""
    target = target_rows(rows, frame)
    for step, (out, counts) in enumerate(steps(net, rows, frame, positions), 1):
        index = counts.flatten().nonzero().squeeze(-1)
        chosen, p, weight = net.predicted(out.flatten(0, 1)[index]), target[index], _weight(net, frame)
        yield f"accept_{step}", output_loss(chosen, weight, p)[1]
        if step == 1:
            best = [(part.to(weight.dtype) @ weight.T).argmax(-1) for part in torch.split(chosen, _CHUNK)]
            yield "covered", p.sum(-1)
            yield "top_1", (torch.cat(best) == p.argmax(-1)).float()
