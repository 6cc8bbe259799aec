"""What draftproof makes of a tiny model, compared with transformers' own greedy generation, token by token."""

import copy
import random
import traceback
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig

from architectures.overrides import CANNOT_BE_MADE
from architectures.tiny import VOCAB, draw_weights, tiny_config, tiny_model
from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.hf import HFBackend
from draftproof.backends.lean import LeanBackend, supports
from draftproof.engine.registry import make_drafter, make_verifier

LENGTHS = (3, 17, 60, 150, 41)  # longer than every window and every original length of a configuration
LIMITS = (30, 12, 30, 30, 18)  # new tokens; the second request ends first, and the last takes its place
FIRST_TOKEN = 4  # those before are special
TIE = 1e-4  # a gap between the two best logits that rounding may close
TOLERANCE = 1e-3  # of logits, relative to the largest
DISTURBANCE = 0.05  # of the draft model's weights: some of its tokens are accepted, some are not
SEVERITY = ("exact", "tie", "refused", "wrong", "crash")
COMPOSITIONS = {  # name -> drafter, rule, temperature of the draft
    "alone": ("none", "block", None),
    "batch": ("none", "block", None),
    "ngram:4": ("ngram:4", "block", None),
    "model": ("model", "block", None),
    "chains:2": ("chains:2", "trie_block", 1.0),
}


class NotMadeError(Exception):
    """A model that cannot be made here, or that transformers itself cannot generate from; says why."""


@dataclass
class Result:
    """What became of a configuration.

    Attributes:
        outcome: exact, refused, wrong, crash or not made.
        detail: the message of a refusal or exception, or the first difference.
        notes: what else is worth knowing.
        compositions: by backend and composition, `exact` or what was found instead.
        acceptance: of the draft model's tokens, by backend.
    """

    outcome: str
    detail: str = ""
    notes: list[str] = field(default_factory=list)
    compositions: dict[str, str] = field(default_factory=dict)
    acceptance: dict[str, float] = field(default_factory=dict)


@dataclass
class Reference:
    """Transformers' generation after each prompt, alone: tokens and the logits that each was chosen from."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    uncached: list[list[int]] | None = None
    notes: list[str] = field(default_factory=list)


def check(configuration, *, seed=0, compositions=COMPOSITIONS):
    """Run every composition of a configuration; after a near tie, again with other weights and prompts."""
    for attempt in range(3):
        result = check_once(configuration, seed=seed + attempt, compositions=compositions)
        if not any(found.startswith("tie") for found in result.compositions.values()):
            break
        result.notes.append(f"a tie with seed {seed + attempt}")
    return result


def check_once(configuration, *, seed, compositions):
    """The same with one seed."""
    prompts, result = make_prompts(seed), Result("exact")
    try:
        model = make_model(configuration, seed)
        pairs = make_backends(model, result)
        if not pairs:
            return result
        reference = generate(model, prompts)
    except NotMadeError as cause:
        return Result("not made", str(cause))
    result.notes.extend(reference.notes)
    for name, pair in pairs.items():
        run_backend(name, *pair, prompts, reference, compositions, result)
    return result


def make_prompts(seed):
    """Random tokens, none of them special; each prompt repeats a few of its own, so that n-gram drafts begin early."""
    source = random.Random(seed)
    prompts = [[source.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)] for length in LENGTHS]
    for prompt in prompts:
        if len(prompt) > 10:
            prompt[-3:] = prompt[2:5]
    return prompts


def make_model(configuration, seed):
    """The random model of a configuration.

    Raises:
        NotMadeError: transformers cannot make it.
    """
    try:
        return tiny_model(tiny_config(configuration.model_type, **configuration.changes), seed)
    except Exception as cause:
        raise NotMadeError(CANNOT_BE_MADE.get(configuration.model_type) or said(cause)) from cause


def said(cause):
    """Type and message of an exception on one line."""
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300]


# --- the reference ----------------------------------------------------------------------------------------------------


def generate(model, prompts):
    """Transformers' greedy generation on a copy of the model, with its cache; without it where it has none that works.

    Raises:
        NotMadeError: transformers cannot generate from it.
    """
    notes = []
    try:
        cached = generate_each(model, prompts, use_cache=True)
    except Exception as cause:  # noqa: BLE001 - whatever a model class raises
        cached, why = None, said(cause)
    try:
        uncached = generate_each(model, prompts, use_cache=False)
    except Exception as cause:
        if cached is None:
            raise NotMadeError(f"transformers' own generation fails: {why}") from cause
        uncached = None
        notes.append(f"transformers' generation without a cache fails: {said(cause)}")
    if cached is None:
        notes.append(f"compared with generation without a cache, because transformers' with a cache fails: {why}")
        cached = uncached
    made = Reference(*cached, uncached=uncached and uncached[0], notes=notes)
    if not all(rows.isfinite().all() for rows in made.logits):
        raise NotMadeError("its logits are not finite")
    if uncached is not None and uncached is not cached:
        notes.extend(compare_caching(cached, uncached))
    return made


def compare_caching(cached, uncached):
    """A note where transformers' generation differs with and without its own cache."""
    for prompt, (mine, other) in enumerate(zip(cached[0], uncached[0], strict=True)):
        place = first_difference(mine, other)
        if place is not None:
            gap = top_gap(uncached[1][prompt][place])
            return [
                f"transformers' generation with its cache differs from without: prompt of {LENGTHS[prompt]}, "
                f"new token {place}" + (" (a tie)" if gap < TIE else "")
            ]
    error = max(relative(mine, other) for mine, other in zip(cached[1], uncached[1], strict=True))
    if error > TOLERANCE:
        return [f"transformers' logits with its cache differ from those without by {error:.1g} of the largest"]
    return []


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
    return tokens, logits


def first_difference(left, right):
    """The place of the first token that differs; None where there is none."""
    return next((place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)


def top_gap(row):
    """How much the best logit is above the second."""
    best = row.topk(2).values
    return float(best[0] - best[1])


def relative(found, wanted):
    """The largest difference, relative to the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


# --- draftproof -------------------------------------------------------------------------------------------------------


def make_backends(model, result):
    """Target and draft by the name of the backend; a refusal or an exception goes to the result."""
    pairs = {}
    for name, make in (("hf", HFBackend), ("lean", LeanBackend)):
        if name == "lean" and supports(model) is not None:
            break
        try:
            pairs[name] = make(copy.deepcopy(model), name="target"), make(disturbed(model), name="draft")
        except UserError as cause:
            if name == "hf":
                result.outcome, result.detail = "refused", str(cause)
                break
            result.notes.append(f"{name} refuses: {cause}")
        except Exception as cause:  # noqa: BLE001 - that is what is looked for
            result.outcome, result.detail = "crash", f"{name}, construction: {said(cause)} {where(cause)}"
    return pairs


def run_backend(name, target, draft, prompts, reference, compositions, result):
    """Run all compositions on one backend and add what was found to the result."""
    for composition in compositions:
        if composition.startswith("chains") and not target.capabilities.trees:
            result.notes.append(f"{name} offers no trees")
            continue
        found = run_composition(composition, target, draft, prompts, reference, result, name)
        result.compositions[f"{name}, {composition}"] = found
        kind, _, detail = found.partition(": ")
        if SEVERITY.index(kind) > SEVERITY.index(result.outcome):
            result.outcome, result.detail = kind, f"{name}, {composition}: {detail}"


def disturbed(model):
    """A draft model whose tokens are often, not always, the target's."""
    made = copy.deepcopy(model)
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weights in made.parameters():
            if weights.is_floating_point():
                weights.mul_(1 + DISTURBANCE * torch.randn(weights.shape, generator=source))
    return made


def where(cause):
    """File and line of the innermost frame."""
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return f"(in {frame.name}, {frame.filename.rpartition('/')[2]})"


def run_composition(composition, target, draft, prompts, reference, result, name):
    """`exact`, `tie: ...`, `wrong: ...` or `crash: ...`."""
    rows = {}
    forward = target.forward
    target.forward = recording(forward, rows)
    try:
        outs = continue_prompts(composition, target, draft, prompts)
    except UserError as cause:
        return f"refused: when it is asked to generate: {cause}"
    except Exception as cause:  # noqa: BLE001 - that is what is looked for
        return f"crash: {said(cause)} {where(cause)}"
    finally:
        target.forward = forward
    if composition == "model":
        drafted = sum(out.stats.num_draft_tokens for out in outs)
        result.acceptance[name] = sum(out.stats.num_accepted_tokens for out in outs) / max(drafted, 1)
    return verdict([out.token_ids for out in outs], rows, prompts, reference)


def continue_prompts(composition, target, draft, prompts):
    """What the engine makes of the prompts: one by one, or four at a time."""
    drafter, rule, temperature = COMPOSITIONS[composition]
    reads_draft = drafter.startswith(("model", "chains"))
    part = make_drafter(
        drafter, target=target, draft=draft if reads_draft else None, stopper="fixed:4", temperature=temperature
    )
    engine = Engine(target, part, make_verifier(rule), max_batch=4)
    params = [SamplingParams(max_tokens=limit, temperature=0, seed=1) for limit in LIMITS]
    if composition == "alone":
        return [engine.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    return engine.generate(prompts, params)


def recording(forward, rows):
    """The forward pass of a backend, with every row of logits kept by the tokens that it follows."""

    def recorded(feeds, **options):
        outputs = forward(feeds, **options)
        for feed, output in zip(feeds, outputs, strict=True):
            session = feed.session
            stem, tail = session.tokens[: session.stem], session.tokens[session.stem :]
            paths, above = [], session.tail
            for node, parent in enumerate(above):
                paths.append([*(paths[parent] if parent >= 0 else stem), tail[node]])
            contexts = [*([stem] if len(feed.tokens) else []), *paths]
            for context, row in zip(contexts[-len(output.logits) :], output.logits, strict=True):
                rows[tuple(context)] = row.float()
        return outputs

    return recorded


def verdict(found, rows, prompts, reference):
    """What the tokens and logits of a composition are, beside the reference."""
    for prompt, (ours, theirs) in enumerate(zip(found, reference.tokens, strict=True)):
        place = first_difference(ours, theirs)
        if place is None and len(ours) != len(theirs):
            return f"wrong: prompt of {LENGTHS[prompt]}: {len(ours)} new tokens, not {len(theirs)}"
        if place is not None:
            if top_gap(reference.logits[prompt][place]) < TIE:
                return f"tie: prompt of {LENGTHS[prompt]}, new token {place}"
            plain = reference.uncached and ours == reference.uncached[prompt]
            return (
                f"wrong: prompt of {LENGTHS[prompt]}, new token {place} is {ours[place]}, not {theirs[place]}"
                + (" (equal to generation without a cache)" if plain else "")
            )
    return logits_verdict(rows, prompts, reference)


def logits_verdict(rows, prompts, reference):
    """Whether the rows along the reference's tokens are the reference's rows."""
    for prompt, tokens in enumerate(reference.tokens):
        for place, wanted in enumerate(reference.logits[prompt]):
            row = rows.get((*prompts[prompt], *tokens[:place]))
            if row is not None and not relative(row, wanted) < TOLERANCE:
                return (
                    f"wrong: prompt of {LENGTHS[prompt]}, new token {place}: right, but its logits are off by "
                    f"{relative(row, wanted):.1g} of the largest"
                )
    return "exact"
