"""What transformers itself generates from a tiny model: the reference that everything is compared with."""

import copy
import random
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from support.architectures.tiny import VOCAB

LENGTHS = (3, 17, 60, 150, 41, 530)  # below and above every window and original length; the last is read in chunks
LIMITS = (24, 30, 12, 30, 18, 8)  # new tokens; the third request ends first, and others take its place
FIRST_TOKEN = 4  # those before are special
TIE = 1e-4  # a gap between the two best logits that rounding may close
TOLERANCE = 1e-3  # of logits, relative to the largest
WITH_CACHE, WITHOUT_CACHE = "with a cache", "without a cache"


class NotMadeError(Exception):
    """A model that cannot be made here, or that transformers itself cannot generate from; says why."""


@dataclass
class Reference:
    """Transformers' generation after each prompt, alone: tokens and the logits that each was chosen from."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]


def make_prompts(seed):
    """Random tokens, none of them special; each prompt repeats a few of its own, so that n-gram drafts begin early."""
    source = random.Random(seed)
    prompts = [[source.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)] for length in LENGTHS]
    for prompt in prompts:
        if len(prompt) > 10:
            prompt[-3:] = prompt[2:5]
    return prompts


def said(cause):
    """Type and message of an exception on one line."""
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300]


def generate(model, prompts, result):
    """Transformers' greedy generation with its cache and, where that is another, without; notes go to the result.

    Raises:
        NotMadeError: transformers cannot generate from it.
    """
    made, failures = {}, {}
    for name, use_cache in ((WITH_CACHE, True), (WITHOUT_CACHE, False)):
        try:
            made[name] = generate_each(model, prompts, use_cache=use_cache)
        except Exception as cause:  # noqa: BLE001 - whatever a model class raises
            failures[name] = said(cause)
    if not made:
        raise NotMadeError(f"transformers' own generation fails: {failures[WITH_CACHE]}")
    if not all(rows.isfinite().all() for reference in made.values() for rows in reference.logits):
        raise NotMadeError("its logits are not finite")
    result.notes.extend(f"transformers' generation {name} fails: {why}" for name, why in failures.items())
    if len(made) == 2:
        difference = compare_caching(*made.values())
        if difference:
            result.notes.append(difference)
        else:
            del made[WITHOUT_CACHE]
    return made


def generates_twice_alike(model, prompts):
    """Whether transformers generates the same in two runs; Reformer draws its hashes at random."""
    first, second = (generate_each(model, prompts, use_cache=True) for _ in range(2))
    return first.tokens == second.tokens


def compare_caching(cached, uncached):
    """A note where transformers' generation differs with and without its own cache."""
    for prompt, (mine, other) in enumerate(zip(cached.tokens, uncached.tokens, strict=True)):
        place = first_difference(mine, other)
        if place is not None:
            tie = " (a tie)" if top_gap(uncached.logits[prompt][place]) < TIE else ""
            return (
                "transformers' generation with its cache differs from that without: "
                f"prompt of {LENGTHS[prompt]}, new token {place}{tie}"
            )
    error = max(relative(mine, other) for mine, other in zip(cached.logits, uncached.logits, strict=True))
    if error < TOLERANCE:
        return ""
    return f"transformers' logits with its cache differ from those without by {error:.1g} of the largest"


@torch.inference_mode()
def generate_each(model, prompts, *, use_cache):
    """Tokens and logits after each prompt, from an untouched copy of the model."""
    model = copy.deepcopy(model)
    tokens, logits = [], []
    for prompt, limit in zip(prompts, LIMITS, strict=True):
        model.generation_config = GenerationConfig()
        options = GenerationConfig(
            max_new_tokens=limit, do_sample=False, use_cache=use_cache, output_logits=True, return_dict_in_generate=True
        )
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(out.logits).float())
    return Reference(tokens, logits)


def first_difference(left, right):
    """The place of the first token that differs; None where there is none."""
    return next((place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)


def top_gap(row):
    """How much the best logit is above the second."""
    best = row.topk(2).values
    return float(best[0] - best[1])


def relative(found, expected):
    """The largest difference, relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())
