"""What draftproof makes of a tiny model, compared with transformers' own greedy generation, token by token."""

import copy
import functools
import traceback
from dataclasses import dataclass, field

import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.generate import PlainBackend
from draftproof.backends.hf.snapshots import SnapshotBackend
from draftproof.backends.lean.backend import LeanBackend, supports
from draftproof.backends.lean.module_backend import LeanModulesBackend
from draftproof.backends.loading.by_name import reads_modules
from draftproof.backends.recurrent.mixers import mixers_of
from draftproof.engine.drafter_parts import make_drafter, reads_draft
from draftproof.engine.verifier_parts import make_verifier
from draftproof.errors import UndraftableError
from support.architectures.overrides import CANNOT_BE_MADE
from support.architectures.reference import (
    LENGTHS,
    LIMITS,
    TIE,
    TOLERANCE,
    WITH_CACHE,
    NotMadeError,
    first_difference,
    generate,
    generates_twice_alike,
    make_prompts,
    relative,
    said,
    top_gap,
)
from support.architectures.tiny import tiny_config, tiny_model

ATTEMPTS = 4
DISTURBANCE = 0.05  # of the draft model's weights: some of its tokens are accepted, some are not
SEVERITY = ("exact", "plain", "tie", "refused", "wrong", "crash")
PLAIN = ("alone", "batch")  # compositions of a model that cannot be drafted for
COMPOSITIONS = {  # name -> drafter, rule, temperature of the draft
    "alone": ("none", "block", None),
    "batch": ("none", "block", None),
    "ngram:4": ("ngram:4", "block", None),
    "model": ("model", "block", None),
    "chains:2": ("chains:2", "trie_block", 1.0),
}


@dataclass
class Result:
    """What became of a configuration.

    Attributes:
        outcome: exact, plain (exact, but without drafts), refused, wrong, crash or not made.
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
class Generated:
    """What the engine made of the prompts in one composition.

    Attributes:
        tokens: new ones of each prompt.
        rows: logits by the tokens that they follow.
        failure: in place of both, `refused: ...` or `crash: ...`.
        acceptance: the share of the drafted tokens that was accepted.
    """

    tokens: list[list[int]] = field(default_factory=list)
    rows: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    failure: str = ""
    acceptance: float = 0.0


def check(configuration, *, seed=0, compositions=COMPOSITIONS):
    """Run every composition of a configuration; after a near tie, again with other weights and prompts."""
    ties = []
    for attempt in range(seed, seed + ATTEMPTS):
        result = check_once(configuration, seed=attempt, compositions=compositions)
        if not any(found.startswith("tie") for found in result.compositions.values()):
            break
        ties.append(f"a near tie with seed {attempt}")
    result.notes.extend(ties)
    return result


def check_once(configuration, *, seed, compositions):
    """The same with one seed."""
    prompts, result = make_prompts(seed), Result("exact")
    try:
        model = make_model(configuration, seed)
        pairs = make_backends(model, result)
        if not pairs:
            return result
        references = generate(model, prompts, result)
    except NotMadeError as cause:
        return Result("not made", str(cause))
    made = {}
    for name, (target, draft) in pairs.items():
        for composition in compositions:
            if not target.capabilities.rollback and composition not in PLAIN:
                continue
            if composition.startswith("chains") and not target.capabilities.trees:
                result.notes.append(f"{name} offers no trees")
                continue
            made[f"{name}, {composition}"] = run_composition(composition, target, draft, prompts)
    judge(made, prompts, references, result)
    if result.outcome == "wrong" and not generates_twice_alike(model, prompts):
        return Result("not made", f"transformers' own generation is random: two runs differ ({', '.join(pairs)})")
    if result.outcome == "exact" and "plain" in pairs:
        result.outcome = "plain"
    result.acceptance = {name: made[f"{name}, model"].acceptance for name in pairs if f"{name}, model" in made}
    return result


def judge(made, prompts, references, result):
    """Compare every composition with transformers' generation, and put the worst into the result.

    Where transformers' generation with its cache is not its generation without, all compositions must equal the one,
    or all the other.
    """
    for name, reference in references.items():
        found = {run: generated.failure or verdict(generated, prompts, reference) for run, generated in made.items()}
        if not result.compositions or all(each == "exact" for each in found.values()):
            result.compositions, against = found, name
    if against != WITH_CACHE:
        result.notes.append("compared with generation without a cache")
    for run, each in result.compositions.items():
        kind, _, detail = each.partition(": ")
        if SEVERITY.index(kind) > SEVERITY.index(result.outcome):
            result.outcome, result.detail = kind, f"{run}: {detail}"


def make_model(configuration, seed):
    """The random model of a configuration.

    Raises:
        NotMadeError: transformers cannot make it.
    """
    try:
        return tiny_model(tiny_config(configuration.model_type, **configuration.changes), seed)
    except Exception as cause:
        raise NotMadeError(CANNOT_BE_MADE.get(configuration.model_type) or said(cause)) from cause


# --- draftproof -------------------------------------------------------------------------------------------------------


def make_backends(model, result):
    """Target and draft by the name of the backend; a refusal or an exception goes to the result."""
    pairs = {}
    kinds = {"snapshot": SnapshotBackend} if mixers_of(model) else {"hf": HFBackend, "lean": LeanBackend}
    if supports(model) is not None and "lean" in kinds:
        del kinds["lean"]
        if reads_modules(model):
            kinds["lean"] = functools.partial(LeanModulesBackend, pack=True)
    for name, make in kinds.items():
        try:
            pairs[name] = make(copy.deepcopy(model), name="target"), make(disturbed(model), name="draft")
        except UndraftableError as cause:
            if name == "lean":
                result.notes.append(f"{name} refuses: {cause}")
                continue
            try:
                pairs["plain"] = (PlainBackend(copy.deepcopy(model), name="target"),) * 2
                result.notes.append(f"no drafts: {cause}")
            except UserError as other:
                result.outcome, result.detail = "refused", f"{cause}; nor can it be decoded plainly: {other}"
            break
        except UserError as cause:
            if name != "lean":
                result.outcome, result.detail = "refused", str(cause)
                break
            result.notes.append(f"{name} refuses: {cause}")
        except Exception as cause:  # noqa: BLE001 - that is what is looked for
            result.outcome, result.detail = "crash", f"{name}, construction: {said(cause)} {where(cause)}"
    return pairs


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


def run_composition(composition, target, draft, prompts):
    """What the engine makes of the prompts in a composition."""
    made = Generated()
    forward = target.forward
    target.forward = recording(forward, made.rows)
    try:
        outs = continue_prompts(composition, target, draft, prompts)
    except UserError as cause:
        made.failure = f"refused: when it is asked to generate: {cause}"
    except Exception as cause:  # noqa: BLE001 - that is what is looked for
        made.failure = f"crash: {said(cause)} {where(cause)}"
    else:
        made.tokens = [out.token_ids for out in outs]
        drafted = sum(out.stats.num_draft_tokens for out in outs)
        made.acceptance = sum(out.stats.num_accepted_tokens for out in outs) / max(drafted, 1)
    finally:
        target.forward = forward
    return made


def continue_prompts(composition, target, draft, prompts):
    """What the engine makes of the prompts: one by one, or four at a time."""
    drafter, rule, temperature = COMPOSITIONS[composition]
    part = make_drafter(
        drafter,
        target=target,
        draft=draft if reads_draft(drafter) else None,
        stopper="fixed:4",
        temperature=temperature,
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


def verdict(generated, prompts, reference):
    """`exact`, `tie: ...` or `wrong: ...`: tokens and logits of a composition, beside transformers'."""
    for prompt, (ours, theirs) in enumerate(zip(generated.tokens, reference.tokens, strict=True)):
        place = first_difference(ours, theirs)
        if place is None and len(ours) != len(theirs):
            return f"wrong: prompt of {LENGTHS[prompt]}: {len(ours)} new tokens, not {len(theirs)}"
        if place is not None:
            if top_gap(reference.logits[prompt][place]) < TIE:
                return f"tie: prompt of {LENGTHS[prompt]}, new token {place}"
            return f"wrong: prompt of {LENGTHS[prompt]}, new token {place} is {ours[place]}, not {theirs[place]}"
    return logits_verdict(generated.rows, prompts, reference)


def logits_verdict(rows, prompts, reference):
    """Whether the rows along the reference's tokens are the reference's rows."""
    for prompt, tokens in enumerate(reference.tokens):
        for place, expected in enumerate(reference.logits[prompt]):
            row = rows.get((*prompts[prompt], *tokens[:place]))
            if row is not None and not relative(row, expected) < TOLERANCE:
                return (
                    f"wrong: prompt of {LENGTHS[prompt]}, new token {place}: right, but its logits are off by "
                    f"{relative(row, expected):.1g} of the largest"
                )
    return "exact"
