"""Losses of language models that imitate a target, and their figures: bits per byte, acceptance by the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_AT_ONCE = 16  # windows in a forward pass
Distance = Callable[[Float[Tensor, "*rows vocab"], Float[Tensor, "*rows vocab"]], Float[Tensor, "*rows"]]


def forward_kl(log_p: Float[Tensor, "*rows vocab"], log_q: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows"]:
    """KL(p || q) of each row: the draft q gives mass to every token of the target p."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Float[Tensor, "*rows vocab"], log_q: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows"]:
    """KL(q || p) of each row: the draft q gives little mass to tokens that are unlikely under the target p."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def total_variation(log_p: Float[Tensor, "*rows vocab"], log_q: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows"]:
    """Half the sum of |p - q| of each row: exactly the probability that a drafted token is rejected."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


LOSSES: dict[str, Distance] = {"kl": forward_kl, "reverse_kl": reverse_kl, "tv": total_variation}


def logits_of(model: Any, ids: Int[Tensor, "rows length"], *, low: bool) -> Float[Tensor, "rows length vocab"]:
    """Logits in float32 of a model of transformers; `low` multiplies in bfloat16, and the weights do not change."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=low):
        made: Tensor = model(input_ids=ids, use_cache=False).logits
    return made.float()


def text_loss(model: nn.Module, windows: Int[Tensor, "rows length"], *, low: bool) -> Float[Tensor, ""]:
    """Mean cross-entropy of all tokens of the windows except the first of each."""
    logits = logits_of(model, windows[:, :-1], low=low)
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), ignore_index=-1)


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: Int[Tensor, "rows length"], size: int) -> float:
    """Bits that the model needs for a byte of complete texts (`corpus.held_out`) of `size` bytes; end tokens count."""
    nats = 0.0
    for part in torch.split(windows, _AT_ONCE):
        logits, labels = logits_of(model, part[:, :-1].clamp(min=0), low=False), part[:, 1:].flatten()
        nats += float(cross_entropy(logits.flatten(0, 1), labels, ignore_index=-1, reduction="sum"))
    return nats / math.log(2) / size


@torch.no_grad()
def agreement(
    target: nn.Module, draft: nn.Module, windows: Int[Tensor, "rows length"], *, skip: int = 0, at_once: int = _AT_ONCE
) -> dict[str, float]:
    """Agreement of a draft with a target at temperature 1, over the positions of windows, where -1 is padding.

    The first `skip` tokens of each window are not predicted.

    Returns:
        "acceptance": the mean of sum min(p, q), the probability that a drafted token is accepted; "top_agreement": how
        often both models have the same most likely token.
    """
    total, top, count = 0.0, 0, 0
    for part in torch.split(windows, at_once):
        ids, there = part[:, :-1].clamp(min=0), part[:, 1:] >= 0
        there[:, : max(skip - 1, 0)] = False
        p, q = (logits_of(model, ids, low=False)[there].softmax(-1) for model in (target, draft))
        total += float(torch.minimum(p, q).sum(-1).sum())
        top += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += int(there.sum())
    return {"acceptance": total / count, "top_agreement": top / count}


@torch.no_grad()
def sampled(model: Any, prompts: Int[Tensor, "rows known"], length: int) -> Int[Tensor, "rows length"]:
    """The prompts with the model's continuation at temperature 1, `length` tokens each; end tokens do not stop it."""
    made: Tensor = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,
        pad_token_id=0,
        max_length=length,
        min_length=length,
    )
    return made
