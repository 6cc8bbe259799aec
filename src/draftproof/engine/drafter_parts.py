"""The declarations of all drafters (name, argument, what they read, which rules they fit), and `make_drafter`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from draftproof.backends.base import Backend, info
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.feature_head import FeatureBackend
from draftproof.backends.heads.feature_net import load_net
from draftproof.backends.heads.published.mtp import has_prediction_layers
from draftproof.backends.heads.self_draft import EarlyExitBackend, QuantizedBackend, SelfDraftBackend
from draftproof.drafters.auto import AutoDrafter, CandidateDrafter
from draftproof.drafters.base import Drafter
from draftproof.drafters.extended import ExtendedDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.drafters.self_draft import SelfDraftModel, self_drafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.composition import HEAD, DrafterTraits, incompatible_reason, no_rollback_reason
from draftproof.engine.drafter_context import DrafterContext, DrafterPart, assuming
from draftproof.engine.parts import directory, find, has_several_chains, numbers, own_chain_count
from draftproof.engine.published_parts import PUBLISHED
from draftproof.engine.stopper_parts import DEFAULT_STOPPER, SHIPPED_FEATURE_HEADS, find_stopper
from draftproof.engine.verifier_parts import find_verifier
from draftproof.errors import UserError
from draftproof.native.tensors import BITS
from draftproof.peak import available
from draftproof.stoppers.auto import Auto
from draftproof.stoppers.base import AcceptanceRates
from draftproof.stoppers.costs import UNKNOWN, DraftCosts
from draftproof.verifiers.base import Verifier

_log = logging.getLogger(__name__)
DEFAULT_DRAFTER = "auto"
QUANTIZED_RATES = AcceptanceRates(0.85, 0.85)  # of the target with weights of 4 bits, before anything is counted
QUANTIZED_SHARE, MARGIN = 0.4, 1.5  # memory of such weights beside the model's, and how much more must be free


def _chains(parts: DrafterContext, argument: str) -> Drafter:
    return SampledTreeDrafter(parts.model(), parts.make_stopper(), chains=_chain_count(argument))


def _tree(parts: DrafterContext, argument: str) -> Drafter:
    factors = numbers(argument, "tree:4x2x1") or [4, 2, 1, 1]
    return SampledTreeDrafter(parts.model(), parts.make_stopper(), factors=factors)


def _layers_and_chains(argument: str) -> list[int]:
    """The numbers in L or LxK."""
    found = numbers(argument, "early_exit:20x4")
    if not 1 <= len(found) <= 2:
        raise UserError(
            f"drafter early_exit: expected a number of layers, for example early_exit:20, got {argument or 'none'}"
        )
    return found


def _bits_and_chains(argument: str) -> list[int]:
    """The numbers in B or BxK."""
    found = numbers(argument, "quantized:4x2") or [BITS[0]]
    if len(found) > 2 or found[0] not in BITS:
        raise UserError(
            f"drafter quantized: expected the bits of a weight, {', '.join(f'quantized:{bits}' for bits in BITS)}, or "
            f"quantized:4x2 for two chains, got {argument!r}"
        )
    return found


def _inside(
    name: str, part: Callable[[SlotBackend, int], SelfDraftBackend], read: Callable[[str], list[int]]
) -> Callable[[DrafterContext, str], Drafter]:
    """A drafter from a smaller form of the target; its argument is one number, and the number of chains."""

    def build(parts: DrafterContext, argument: str) -> Drafter:
        size, *chains = read(argument)
        made = SelfDraftModel(part(parts.target_backend(name), size), f"{name}:{size}", **parts.changes)
        return self_drafter(made, parts.make_stopper(), chains=chains[0] if chains else 1)

    return build


def _feature_head(parts: DrafterContext, argument: str) -> Drafter:
    where, chains = directory(argument) if argument else (SHIPPED_FEATURE_HEADS.get(parts.target.name), 1)
    if where is None:
        raise UserError(
            f"drafter feature_head needs the directory of a head, for example feature_head:heads/mine: none ships for "
            f"{parts.target.name} (one ships for {', '.join(SHIPPED_FEATURE_HEADS)}); draftproof train makes heads"
        )
    target = parts.target_backend("feature_head")
    net = load_net(where)
    head = parts.with_head_bits(lambda bits: FeatureBackend(target, net, bits))
    return parts.head_drafter(head, "feature_head", chains)


def _lookup(make: Callable[..., Drafter], example: str) -> Callable[[DrafterContext, str], Drafter]:
    """A drafter that reads tokens only; its argument is the length of its longest draft."""

    def build(parts: DrafterContext, argument: str) -> Drafter:  # noqa: ARG001
        found = numbers(argument, example)
        if len(found) > 1:
            raise UserError(f"expected one integer, for example {example}, got {argument!r}")
        return make(*found)

    return build


def _auto_drafter(parts: DrafterContext, argument: str) -> Drafter:
    """The drafter that chooses among all available sources; with a stopper other than auto, the first of them."""
    if why := no_rollback_reason(parts.target):
        if argument:
            raise UserError(f"{why}: leave out the head {argument!r}")
        if parts.draft is not None:
            raise UserError(f"{why}: leave out the draft model {parts.draft.name!r}")
        return NoDrafter()
    _one_chain_of_head(argument)
    names = list(_available(parts, argument))
    if parts.stopper != DEFAULT_STOPPER:
        return _first_that_fits(parts, names, argument)
    common = DraftCosts()
    sources = []
    for name in names:
        part = find_drafter(name)[0]
        stopper = assuming(_named(parts, name), common)
        shown = f"model {parts.draft.name}" if name == "model" and parts.draft is not None else name
        steps = _steps(parts, name, stopper)
        made = CandidateDrafter(
            shown, stopper, iter([next(steps)]) if name == argument else steps, quick=part.name != "quantized"
        )
        if part.traits.reads_states:
            made.build(0.0)  # the target keeps states for it from now on, and the first prompt may be read any time
        sources.append(made)
    masses = parts.rule is None or parts.rule.point_masses
    return AutoDrafter(sources, SuffixDrafter(shared=False), common, masses=masses)


def _one_chain_of_head(argument: str) -> None:
    """Refuse an argument of auto that is not the drafter of a head with one chain."""
    if not argument:
        return
    part, own = find_drafter(argument)
    if part.name == "auto" or not part.traits.reads_states or part.branches(own):
        raise UserError(
            f"drafter auto: expected the drafter of a head after auto:, with one chain, as auto:eagle3:heads/mine has "
            f"it, got {argument!r} (draft models are named with draft (--draft), and auto uses lookups by itself)"
        )
    part.check(own)


def _available(parts: DrafterContext, argument: str) -> Iterator[str]:
    """Names of the model-based drafters that a target has: first those that the user names, then the cheapest."""
    if argument:
        yield argument
    if parts.draft is not None:
        yield "model"
    if not isinstance(parts.target, SlotBackend):
        return
    if has_prediction_layers(parts.target) and argument.partition(":")[0] != "mtp":
        yield "mtp"
    try:
        next(parts.target.quantizing(BITS[0]))
        yield f"quantized:{BITS[0]}"
    except UserError:
        pass
    if parts.target.name in SHIPPED_FEATURE_HEADS and argument.partition(":")[0] != "feature_head":
        yield "feature_head"


def _first_that_fits(parts: DrafterContext, names: Sequence[str], argument: str) -> Drafter:
    """The drafter that `argument` names, or the first that fits the rule; plain decoding if there is none."""
    for name in names:
        if name != argument and parts.rule and why_not(name, parts.stopper, parts.rule.name):
            continue
        found = _named(parts, name)
        try:
            return found.part.make(found, found.argument)
        except UserError as error:
            if name in (argument, "model"):  # the user asked for it
                raise
            _log.warning("drafter %s cannot be used (%s): decoding continues without it", name, error)
    return NoDrafter()


def _named(parts: DrafterContext, name: str) -> DrafterContext:
    """The same context for another drafter."""
    part, argument = find_drafter(name)
    return replace(parts, spec=name, part=part, argument=argument)


def _model_share(parts: DrafterContext, argument: str) -> float:  # noqa: ARG001
    """The size of the draft model's weights as a share of the target's; an estimate from widths and depths."""
    if parts.draft is None:
        return UNKNOWN.draft
    small = info(parts.draft)
    target = info(parts.target)
    return UNKNOWN.draft if small is None or target is None else small.size / target.size


def _quantized_share(parts: DrafterContext, argument: str) -> float:
    """The bits of a weight, scale and offset included, as a share of the target's."""
    target = info(parts.target)
    return UNKNOWN.draft if target is None else (_bits_and_chains(argument)[0] + 1) / (8 * target.dtype.itemsize)


def _steps(parts: DrafterContext, name: str, stopper: Auto) -> Iterator[ModelDrafter | None]:
    """Make a drafter in steps; only quantizing takes more than one."""
    found = _named(parts, name)
    argument = found.argument
    if found.part.name != "quantized":
        made = found.part.make(replace(found, ready=stopper), argument)
        assert isinstance(made, ModelDrafter), "one chain from a model"
        yield made
        return
    target = parts.target_backend(name)
    needed, free = round(QUANTIZED_SHARE * target.facts.size), available(target.device)
    if free is not None and free < MARGIN * needed:
        raise UserError(f"its weights need {needed >> 20} MiB, but only {free >> 20} MiB of memory are free")
    quantized = None
    for quantized in target.quantizing(int(argument)):
        if quantized is None:
            yield None
    part = QuantizedBackend(target, int(argument), quantized)
    yield ModelDrafter(SelfDraftModel(part, f"quantized:{argument}", **parts.changes), stopper)


def _chain_count(argument: str) -> int:
    """The K of K."""
    return (numbers(argument, "chains:4") or [4])[0]


DRAFTERS: dict[str, DrafterPart] = {
    part.name: part
    for part in (
        DrafterPart(
            name="auto",
            argument="HEAD",
            about="in every round the best of the draft model, the target's own prediction layers, a head that ships "
            "for it or is named (auto:eagle3:HEAD), the target with 4-bit weights, repeated passages, and nothing "
            "(default)",
            make=_auto_drafter,
            traits=replace(HEAD, accepts_draft_model=True),
            check=_one_chain_of_head,
        ),
        DrafterPart(
            name="none",
            about="no drafts: plain decoding",
            make=lambda *_: NoDrafter(),
            traits=DrafterTraits(constant_length=True),
            stops=False,
        ),
        DrafterPart(
            name="model",
            about="one chain from the draft model",
            make=lambda parts, _: ModelDrafter(parts.model(), parts.make_stopper()),
            traits=DrafterTraits(reads_draft=True),
            share=_model_share,
        ),
        DrafterPart(
            name="chains",
            argument="K",
            about="K i.i.d. chains from the draft model, equal prefixes merged",
            make=_chains,
            traits=DrafterTraits(reads_draft=True),
            share=_model_share,
            branches=lambda _: True,
            chains=_chain_count,
        ),
        DrafterPart(
            name="tree",
            argument="AxBxC",
            about="a prefix tree from the draft model: A draws at the root, B at each of its nodes, ...",
            make=_tree,
            traits=DrafterTraits(reads_draft=True),
            share=_model_share,
            branches=lambda _: True,
        ),
        DrafterPart(
            name="early_exit",
            argument="L",
            about="one chain from the target's own first L layers; early_exit:LxK makes K i.i.d. chains",
            make=_inside("early_exit", EarlyExitBackend, _layers_and_chains),
            traits=DrafterTraits(shares_cache=True),
            branches=has_several_chains,
            chains=own_chain_count,
            check=_layers_and_chains,
        ),
        DrafterPart(
            name="quantized",
            argument="B",
            about="one chain from the target with weights of B bits, 4 or 8; quantized:BxK makes K i.i.d. chains",
            make=_inside("quantized", QuantizedBackend, _bits_and_chains),
            traits=DrafterTraits(shares_cache=True, stationary=False),
            rates=QUANTIZED_RATES,
            share=_quantized_share,
            all_products=True,
            branches=has_several_chains,
            chains=own_chain_count,
            check=_bits_and_chains,
        ),
        DrafterPart(
            name="feature_head",
            argument="DIR",
            about="one chain from a trained layer over the target's hidden states; feature_head:DIRxK makes K chains; "
            f"without DIR the head that ships for the target ({', '.join(SHIPPED_FEATURE_HEADS)})",
            make=_feature_head,
            traits=HEAD,
            branches=has_several_chains,
            chains=own_chain_count,
        ),
        *PUBLISHED,
        DrafterPart(
            name="ngram",
            argument="N",
            about="up to N tokens that followed an earlier occurrence of the last ones; no draft model",
            make=_lookup(NgramDrafter, "ngram:8"),
            stops=False,
            traits=DrafterTraits(point_masses=True),
        ),
        DrafterPart(
            name="suffix",
            argument="N",
            about="up to N tokens that most often followed the longest suffix known from this and other requests",
            make=_lookup(SuffixDrafter, "suffix:16"),
            learns=True,
            stops=False,
            traits=DrafterTraits(point_masses=True),
        ),
    )
}


_EXTENDED = re.compile(r"(?P<first>.+)\+(?P<lookup>suffix(:[0-9]+)?)")


def _extended(first: str, lookup: str) -> DrafterPart:
    """The part of a drafter whose chains are extended by lookups; it must draw single chains."""
    part, argument = find_drafter(first)
    if part.name == "auto" or not part.stops or part.branches(argument):
        raise UserError(
            f"drafter: expected a drafter of one drawn chain before +{lookup}, such as model+{lookup}, got {first} "
            "(auto extends chains by itself if that pays)"
        )

    def make(parts: DrafterContext, _: str) -> Drafter:
        more = _named(parts, lookup)
        found = more.part.make(more, more.argument)
        assert isinstance(found, SuffixDrafter), "by its name"
        return ExtendedDrafter(part.make(replace(parts, spec=first, part=part, argument=argument), argument), found)

    return replace(
        part,
        make=make,
        traits=replace(part.traits, stationary=False),
        learns=True,
        share=lambda parts, _: part.share(parts, argument),
        check=lambda _: part.check(argument),
        branches=lambda _: False,
        chains=lambda _: 1,
    )


def find_drafter(spec: str) -> tuple[DrafterPart, str]:
    """The part and argument of "name" or "name:argument"; "...+suffix:N" extends its chains by lookups."""
    if found := _EXTENDED.fullmatch(spec):
        return _extended(found["first"], found["lookup"]), ""
    return find(DRAFTERS, spec, "drafter", ", ".join(part.form for part in DRAFTERS.values()))


def reads_draft(spec: str | None) -> bool:
    """Whether a drafter uses a draft model if there is one; None is the default drafter."""
    traits = find_drafter(spec or DEFAULT_DRAFTER)[0].traits
    return traits.reads_draft or traits.accepts_draft_model


def why_not(drafter: str, stopper: str | None, verifier: str) -> str | None:
    """Why these parts do not fit together, as the engine's error says; None if they do. Nothing is loaded."""
    part, argument = find_drafter(drafter)
    stopper_part = find_stopper(stopper)[0] if stopper else None
    rule = find_verifier(verifier)[0]
    if stopper and not part.stops:
        return f"drafter {part.name} takes no stopper"
    return incompatible_reason(part.traits_with(argument, stopper_part), rule.traits)


def make_drafter(
    name: str | None,
    *,
    target: Backend,
    draft: Backend | None,
    stopper: str,
    temperature: float | None = None,
    top_k: int | None = None,
    bits: int | None = None,
    whole: str | None = None,
    rule: Verifier | None = None,
    budget: float = math.inf,
) -> Drafter:
    """Make a drafter from "name" or "name:argument"; the default is `auto`.

    `temperature` and `top_k` override the request's for the draft. With `bits`, `draft` is already quantized. `whole`
    is a dtype, in which a head keeps all its weights. See `DrafterContext` for the other arguments.
    """
    spec = name or DEFAULT_DRAFTER
    part, argument = find_drafter(spec)
    traits = part.traits
    if traits.reads_draft and draft is None:
        raise UserError(f"drafter {part.name} needs a draft model: name one with draft (--draft)")
    if not (traits.reads_draft or traits.accepts_draft_model) and draft is not None and part.name != "none":
        raise UserError(f"drafter {part.name} uses no draft model: leave out {draft.name!r}, or choose another drafter")
    if part.name not in ("none", "auto") and (why := no_rollback_reason(target)):
        raise UserError(f"drafter {spec} cannot be used, because {why}: use drafter none")
    heads = spec.removeprefix("auto:").startswith("feature_head") or (
        traits.accepts_draft_model and target.name in SHIPPED_FEATURE_HEADS
    )
    if bits is not None and draft is None and not (heads or part in PUBLISHED):
        raise UserError(
            f"draft_dtype int{bits} is for a draft model or a head, but drafter {spec} has none: leave it out, "
            f"or choose drafter quantized:{bits}, the target with such weights"
        )
    facts = info(target)
    own = whole if facts is None else str(facts.dtype).removeprefix("torch.")
    if draft is None and whole not in (None, own):
        raise UserError(f"draft_dtype: expected auto, int8, int4 or {own}, the dtype of a head's target, got {whole}")
    changes = {"temperature": temperature, "top_k": top_k}
    context = DrafterContext(
        target, draft, stopper, spec, part, argument, changes, bits, whole is not None, rule, budget=budget
    )
    return part.make(context, argument)


def names_head(spec: str | None) -> bool:
    """Whether a drafter is a head, or `auto` with one."""
    if spec is None or spec == DEFAULT_DRAFTER:
        return False
    part, _ = find_drafter(spec.removeprefix(f"{DEFAULT_DRAFTER}:"))
    return part.name == "feature_head" or part in PUBLISHED
