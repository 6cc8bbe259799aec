"""Every drafter, stopper and verifier, declared once: its name and argument, what it reads, what it composes with.

Parsing, help texts, the table of compositions, the benchmark and the documentation are made from these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftproof.backends.base import Backend
from draftproof.backends.feature_net import load_net
from draftproof.backends.slots import SlotBackend
from draftproof.drafters.auto import AutoDrafter, Source
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.feature_head import FeatureModel, feature_drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.drafters.self_draft import EarlyExitModel, QuantizedModel, SelfDraftModel, self_drafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.embedded import feature_head_dir, heads_dir, stories_heads_dir
from draftproof.engine.composition import DrafterTraits, VerifierTraits, misfit
from draftproof.errors import UserError
from draftproof.heads import Head, load_head
from draftproof.kernels.operations import BITS
from draftproof.peak import available
from draftproof.stoppers.auto import ASSUMED, Auto
from draftproof.stoppers.base import AcceptanceRates, Stopper
from draftproof.stoppers.costs import UNKNOWN, LearnedCosts, PassCosts
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.history import Schedule
from draftproof.stoppers.probability import Confidence, Entropy
from draftproof.stoppers.trained import Acceptance, Approximate, Ratio
from draftproof.theory.cost import RoundCosts
from draftproof.verifiers.base import Verifier
from draftproof.verifiers.chain import block_verifier, gumbel_verifier, match_verifier, token_verifier
from draftproof.verifiers.greedy import GreedyBlockVerifier
from draftproof.verifiers.lossy import last_token_verifier, mentored_verifier, mixture_verifier, typical_verifier
from draftproof.verifiers.trie import (
    multi_path_verifier,
    multi_round_verifier,
    spectr_verifier,
    traversal_verifier,
    trie_block_verifier,
)

DEFAULT_DRAFTER = "auto"
DEFAULT_STOPPER, DEFAULT_CONSTANT_STOPPER = "auto", "fixed:4"
DEFAULT_VERIFIER, DEFAULT_TREE_VERIFIER = "block", "trie_block"
SEEDED_VERIFIER = "gumbel"  # of requests with a seed whose drafts depend on a clock
SHIPPED_HEADS = {  # by draft model; in each a directory named as the stopper
    "embedded:draft": heads_dir(),
    "embedded:stories-draft": stories_heads_dir(),
}
SHIPPED_FEATURE_HEADS = {"smollm2-135m": feature_head_dir()}  # by target
QUANTIZED_RATES = AcceptanceRates(0.85, 0.85)  # of the target with weights of 4 bits, before anything is counted
QUANTIZED_SHARE, MARGIN = 0.4, 1.5  # memory of such weights beside the model's, and how much more must be free
OWN_HEADS = "heads"  # a feature head's directory may hold such a directory of its own


@dataclass(frozen=True, kw_only=True)
class Part:
    """What every part declares.

    Attributes:
        name: as users write it.
        about: one line for help texts.
        argument: what stands after "name:", as help texts call it; empty where nothing does.
        example: a whole specification that works.
    """

    name: str
    about: str
    argument: str = ""
    example: str = ""

    @property
    def form(self) -> str:
        """How a specification looks."""
        return f"{self.name}:{self.argument}" if self.argument else self.name

    def refuse(self, argument: str) -> UserError:
        """The error for an argument that this part does not take."""
        if not self.argument:
            return UserError(f"{self.name} takes no argument, and was given {argument!r}")
        return UserError(f"{self.name} cannot read {argument!r}: legal is {self.form}, for example {self.example}")


@dataclass(frozen=True)
class Materials:
    """What a drafter can be made of.

    Attributes:
        target: the target's backend.
        draft: the draft model's, where there is one.
        stopper: its specification.
        spec: the drafter's own specification.
        changes: temperature and top_k of the draft, where they differ from the request's.
        bits: of the weights of a head, where they are quantized; the draft model is quantized already.
        rule: that will verify the drafts; None where it is not known.
        ready: the stopper itself, where it is made already.
    """

    target: Backend
    draft: Backend | None
    stopper: str
    spec: str
    changes: dict[str, Any]
    bits: int | None = None
    rule: Verifier | None = None
    ready: Stopper | None = None

    def ends(self) -> Stopper:
        """The stopper."""
        if self.ready is None and self.stopper == DEFAULT_STOPPER:
            return _assuming(self, self.spec, PassCosts())
        return self.ready or make_stopper(self.stopper, self.spec if self.draft is None else self.draft.name)

    def model(self) -> DraftModel:
        """The draft model."""
        assert self.draft is not None, "checked by make_drafter"
        return DraftModel(self.draft, vocab_size=self.target.vocab_size, **self.changes)

    def own_model(self, name: str) -> SlotBackend:
        """The target, for drafters that work inside it.

        Raises:
            UserError: it has no slot cache.
        """
        if not isinstance(self.target, SlotBackend):
            raise UserError(f"drafter {name} works inside a model's cache, and {self.target.name} has none")
        return self.target


@dataclass(frozen=True, kw_only=True)
class DrafterPart(Part):
    """A drafter.

    Attributes:
        make: from materials and argument.
        reads_draft: whether it needs a draft model.
        takes_draft: whether it uses a draft model where there is one.
        inside: whether it works inside the target's own cache.
        reads_states: whether it reads the target's hidden states.
        learns: whether it drafts from earlier requests, too.
        stops: whether a stopper ends its drafts.
        point_masses: whether its tokens come without probabilities.
        covers: whether it can draft after every token, so that its lengths are as constant as its stopper's.
        steady: whether its probabilities after a text are the same in every round.
        rates: how often its tokens are accepted, before anything is counted.
        share: from materials and argument, what drafting a token costs in target passes, before anything is measured.
        several: from the argument, whether its drafts may branch.
        chains: from the argument, how many i.i.d. chains it draws; 1 for a tree.
        check: refuses an argument that cannot be read, for drafters that `make` needs a loaded target for.
    """

    make: Callable[[Materials, str], Drafter]
    reads_draft: bool = False
    takes_draft: bool = False
    inside: bool = False
    reads_states: bool = False
    learns: bool = False
    stops: bool = True
    point_masses: bool = False
    covers: bool = True
    steady: bool = True
    rates: AcceptanceRates = ASSUMED
    share: Callable[[Materials, str], float] = field(default=lambda *_: 0.1)
    several: Callable[[str], bool] = field(default=lambda _: False)
    chains: Callable[[str], int] = field(default=lambda _: 1)
    check: Callable[[str], object] = field(default=lambda _: None)

    @property
    def catches_up(self) -> bool:
        """Whether it must first read what others drafted: not where its cache is the target's own."""
        return not self.inside or self.reads_states

    @property
    def takes_length(self) -> bool:
        """Whether its argument is the length of a draft, which a stopper sets for other drafters."""
        return not self.stops and bool(self.argument)

    def traits(self, argument: str, stopper: StopperPart | None) -> DrafterTraits:
        """What a rule must know of it."""
        lengths = not self.stops if self.name == "none" else self.covers and stopper is not None and stopper.constant
        constant = lengths and self.steady
        name = f"{self.name}:{argument}" if argument else self.name
        return DrafterTraits(name, self.several(argument), self.point_masses, constant and not self.point_masses)


@dataclass(frozen=True, kw_only=True)
class StopperPart(Part):
    """A stopper.

    Attributes:
        make: from the argument and the name of the draft model.
        constant: whether every draft has the same length.
        head: the kind of trained head that it needs; empty for none.
        offered: whether it can be made from a name; the oracle needs a recorded run.
    """

    make: Callable[[str, str | None], Stopper]
    constant: bool = False
    head: str = ""
    offered: bool = True


@dataclass(frozen=True, kw_only=True)
class VerifierPart(Part):
    """A verification rule.

    Attributes:
        make: from the argument.
        traits: what it takes.
        lossless: whether the output distribution stays the target's.
    """

    make: Callable[[str], Verifier]
    traits: VerifierTraits
    lossless: bool = True


# --- arguments --------------------------------------------------------------------------------------------------------


def numbers(text: str, example: str) -> list[int]:
    """Whole numbers joined by x, such as "4x2x1"; none in an empty text.

    Raises:
        UserError: something else.
    """
    try:
        return [int(part) for part in text.split("x")] if text else []
    except ValueError:
        raise UserError(f"{text!r} is not a row of whole numbers: legal is for example {example}") from None


def _number(text: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text!r} is no number: legal is for example {example}") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _directory(argument: str) -> tuple[Path, str]:
    """The directory of DIR or DIRxK, and K."""
    where, _, chains = argument.rpartition("x")
    if Path(argument).expanduser().exists() or not where or not chains.isdecimal():
        where, chains = argument, "1"
    return Path(where).expanduser(), chains


# --- drafters ---------------------------------------------------------------------------------------------------------


def _model(parts: Materials, argument: str) -> Drafter:
    if argument:
        raise UserError(f"drafter model takes no argument, and was given {argument!r}")
    return ModelDrafter(parts.model(), parts.ends())


def _chains(parts: Materials, argument: str) -> Drafter:
    return SampledTreeDrafter(parts.model(), parts.ends(), chains=_chain_count(argument))


def _tree(parts: Materials, argument: str) -> Drafter:
    factors = numbers(argument, "tree:4x2x1") or [4, 2, 1, 1]
    return SampledTreeDrafter(parts.model(), parts.ends(), factors=factors)


def _layers_and_chains(argument: str) -> list[int]:
    """The numbers of L or LxK."""
    found = numbers(argument, "early_exit:20x4")
    if not 1 <= len(found) <= 2:
        raise UserError("drafter early_exit takes a number of layers: legal is for example early_exit:20")
    return found


def _bits_and_chains(argument: str) -> list[int]:
    """The numbers of B or BxK."""
    found = numbers(argument, "quantized:4x2") or [BITS[0]]
    if len(found) > 2 or found[0] not in BITS:
        raise UserError(
            f"drafter quantized takes the bits of a weight, not {argument!r}: legal are "
            f"{' and '.join(f'quantized:{bits}' for bits in BITS)}, or quantized:4x2 for two chains"
        )
    return found


def _inside(
    name: str, model: Callable[..., SelfDraftModel], read: Callable[[str], list[int]]
) -> Callable[[Materials, str], Drafter]:
    """A drafter from a smaller form of the target, made from one number, and the number of chains."""

    def build(parts: Materials, argument: str) -> Drafter:
        size, *chains = read(argument)
        made = model(parts.own_model(name), size, **parts.changes)
        return self_drafter(made, parts.ends(), chains=chains[0] if chains else 1)

    return build


def _feature_head(parts: Materials, argument: str) -> Drafter:
    where, chains = _directory(argument) if argument else (SHIPPED_FEATURE_HEADS.get(parts.target.name), "1")
    if where is None:
        raise UserError(
            f"drafter feature_head needs the directory of one, for example feature_head:heads/mine: none ships for "
            f"{parts.target.name} (legal without one: {', '.join(SHIPPED_FEATURE_HEADS)}); draftproof train makes them"
        )
    model = FeatureModel(parts.own_model("feature_head"), load_net(where), bits=parts.bits, **parts.changes)
    return feature_drafter(model, parts.ends(), chains=int(chains))


def _lookup(make: Callable[..., Drafter], example: str) -> Callable[[Materials, str], Drafter]:
    """A drafter that reads tokens only, with its longest draft as its argument."""

    def build(parts: Materials, argument: str) -> Drafter:  # noqa: ARG001
        found = numbers(argument, example)
        if len(found) > 1:
            raise UserError(f"{argument!r} is not one whole number: legal is for example {example}")
        return make(*found)

    return build


def _auto_drafter(parts: Materials, argument: str) -> Drafter:
    """What is at hand for a target, to choose from in every round; with a stopper other than auto the first of it."""
    if argument:
        raise UserError(f"drafter auto takes no argument, and was given {argument!r}")
    names = list(_at_hand(parts))
    if parts.stopper != DEFAULT_STOPPER:
        return _first_that_fits(parts, names)
    common = PassCosts()
    sources = []
    for name in names:
        stopper = _assuming(parts, name, common)
        shown = f"model {parts.draft.name}" if name == "model" and parts.draft is not None else name
        sources.append(Source(shown, stopper, _steps(parts, name, stopper)))
    masses = parts.rule is None or parts.rule.point_masses
    return AutoDrafter(sources, SuffixDrafter(shared=False), common, masses=masses)


def _at_hand(parts: Materials) -> Iterator[str]:
    """Names of the drafters from models that a target has without any preparation; the most often right first."""
    if parts.draft is not None:
        yield "model"
    if not isinstance(parts.target, SlotBackend):
        return
    try:
        next(parts.target.quantizing(BITS[0]))
        yield f"quantized:{BITS[0]}"
    except UserError:
        pass
    if parts.target.name in SHIPPED_FEATURE_HEADS:
        yield "feature_head"


def _first_that_fits(parts: Materials, names: Sequence[str]) -> Drafter:
    """The first drafter that the rule takes; plain decoding where there is none."""
    for name in names:
        if parts.rule is None or why_not(name, parts.stopper, parts.rule.name) is None:
            part, argument = find_drafter(name)
            return part.make(replace(parts, spec=name), argument)
    return NoDrafter()


def _assuming(parts: Materials, name: str, passes: PassCosts) -> Auto:
    """The stopper `auto` of a drafter, with what can be assumed before anything is known."""
    part, argument = find_drafter(name)
    costs = LearnedCosts(replace(UNKNOWN, draft=part.share(parts, argument) + UNKNOWN.token), passes)
    return Auto(costs, assumed=part.rates, catches_up=part.catches_up)


def _model_share(parts: Materials, argument: str) -> float:  # noqa: ARG001
    """The draft model's weights as a share of the target's; an estimate from widths and depths."""
    facts = [getattr(each, "facts", None) for each in (parts.draft, parts.target)]
    return UNKNOWN.draft if facts[0] is None or facts[1] is None else facts[0].size / facts[1].size


def _quantized_share(parts: Materials, argument: str) -> float:
    """The bits of a weight and its share of scale and offset, as a share of the target's."""
    facts = getattr(parts.target, "facts", None)
    return UNKNOWN.draft if facts is None else (_bits_and_chains(argument)[0] + 1) / (8 * facts.dtype.itemsize)


def _steps(parts: Materials, name: str, stopper: Auto) -> Iterator[ModelDrafter | None]:
    """Make a drafter in steps; only quantizing takes more than one."""
    part, argument = find_drafter(name)
    if part.name != "quantized":
        made = part.make(replace(parts, spec=name, ready=stopper), argument)
        assert isinstance(made, ModelDrafter), "one chain from a model"
        yield made
        return
    target = parts.own_model(name)
    needed, free = round(QUANTIZED_SHARE * target.facts.size), available()
    if free is not None and free < MARGIN * needed:
        raise UserError(f"its weights take {needed >> 20} MiB, and {free >> 20} MiB of memory are free")
    quantized = None
    for quantized in target.quantizing(int(argument)):
        if quantized is None:
            yield None
    model = QuantizedModel(target, int(argument), part=quantized, **parts.changes)
    yield ModelDrafter(model, stopper)


def _none(parts: Materials, argument: str) -> Drafter:  # noqa: ARG001
    if argument:
        raise UserError(f"drafter none takes no argument, and was given {argument!r}")
    return NoDrafter()


def _chain_count(argument: str) -> int:
    """The K of K."""
    return (numbers(argument, "chains:4") or [4])[0]


def _own_chain_count(argument: str) -> int:
    """The K of LxK or DIRxK; 1 where there is none."""
    _, times, chains = argument.rpartition("x")
    return int(chains) if times and chains.isdecimal() else 1


def _own_several(argument: str) -> bool:
    """Whether LxK or DIRxK names more than one chain."""
    return _own_chain_count(argument) > 1


DRAFTERS: dict[str, DrafterPart] = {
    part.name: part
    for part in (
        DrafterPart(
            name="auto",
            about="in every round what pays most: the draft model, a head that ships for the target, the target with "
            "weights of 4 bits, repeated passages, or nothing (default)",
            make=_auto_drafter,
            takes_draft=True,
            inside=True,
            reads_states=True,
            covers=False,
            steady=False,
        ),
        DrafterPart(name="none", about="nothing is drafted: plain decoding", make=_none, stops=False),
        DrafterPart(
            name="model", about="one chain from the draft model", make=_model, reads_draft=True, share=_model_share
        ),
        DrafterPart(
            name="chains",
            argument="K",
            example="chains:4",
            about="K i.i.d. chains from the draft model, equal prefixes merged",
            make=_chains,
            reads_draft=True,
            share=_model_share,
            several=lambda _: True,
            chains=_chain_count,
        ),
        DrafterPart(
            name="tree",
            argument="AxBxC",
            example="tree:4x2x1",
            about="a prefix tree from the draft model: A draws at the root, B at each of its nodes, ...",
            make=_tree,
            reads_draft=True,
            share=_model_share,
            several=lambda _: True,
        ),
        DrafterPart(
            name="early_exit",
            argument="L",
            example="early_exit:20",
            about="one chain from the target's own first L layers; early_exit:LxK makes K i.i.d. chains",
            make=_inside("early_exit", EarlyExitModel, _layers_and_chains),
            inside=True,
            several=_own_several,
            chains=_own_chain_count,
            check=_layers_and_chains,
        ),
        DrafterPart(
            name="quantized",
            argument="B",
            example="quantized:4",
            about="one chain from the target with weights of B bits, 4 or 8; quantized:BxK makes K i.i.d. chains",
            make=_inside("quantized", QuantizedModel, _bits_and_chains),
            inside=True,
            steady=False,
            rates=QUANTIZED_RATES,
            share=_quantized_share,
            several=_own_several,
            chains=_own_chain_count,
            check=_bits_and_chains,
        ),
        DrafterPart(
            name="feature_head",
            argument="DIR",
            example="feature_head:heads/mine",
            about="one chain from a trained layer over the target's states; feature_head:DIRxK makes K chains; "
            f"without DIR the one that ships for the target ({', '.join(SHIPPED_FEATURE_HEADS)})",
            make=_feature_head,
            inside=True,
            reads_states=True,
            covers=False,
            steady=False,
            several=_own_several,
            chains=_own_chain_count,
        ),
        DrafterPart(
            name="ngram",
            argument="N",
            example="ngram:8",
            about="up to N tokens that followed an earlier occurrence of the last ones; no draft model",
            make=_lookup(NgramDrafter, "ngram:8"),
            stops=False,
            point_masses=True,
        ),
        DrafterPart(
            name="suffix",
            argument="N",
            example="suffix:16",
            about="up to N tokens that most often followed the longest suffix known from this and other requests",
            make=_lookup(SuffixDrafter, "suffix:16"),
            learns=True,
            stops=False,
            point_masses=True,
        ),
    )
}


# --- stoppers ---------------------------------------------------------------------------------------------------------


def _length(make: Callable[..., Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with a whole number as its argument."""

    def build(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
        try:
            return make(int(argument)) if argument else make()
        except ValueError as cause:
            if isinstance(cause, UserError):
                raise
            name = example.partition(":")[0]
            raise UserError(f"stopper {name} takes a whole number, not {argument!r}: for example {example}") from None

    return build


def _threshold(make: Callable[..., Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with a threshold as its argument."""

    def build(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
        return make(_number(argument, example)) if argument else make()

    return build


def _headed(make: Callable[[Head, float | None], Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with a trained head: its directory, a threshold, both or none; default the draft's own shipped head."""
    name = example.partition(":")[0]

    def build(argument: str, draft: str | None) -> Stopper:
        where, _, last = argument.rpartition(":")
        path, threshold = (where, last) if _is_number(last) else (argument, "")
        shelf = None if path else _heads_of(draft)
        if shelf is not None:
            path = str(shelf / name) if (shelf / name).is_dir() else ""
        if not path:
            raise UserError(
                f"stopper {name} needs the directory of a head, for example {example}: none ships for the draft model "
                f"{draft!r} (legal without one are {', '.join(SHIPPED_HEADS)}); draftproof train makes heads"
            )
        return make(load_head(path), float(threshold) if threshold else None)

    return build


def _heads_of(draft: str | None) -> Path | None:
    """Where the heads lie that ship for a draft model, or for a feature head beside its own files."""
    kind, _, argument = (draft or "").partition(":")
    if kind != "feature_head":
        return SHIPPED_HEADS.get(draft or "")
    if argument:
        return _directory(argument)[0] / OWN_HEADS
    (shipped,) = SHIPPED_FEATURE_HEADS.values()
    return shipped / OWN_HEADS


def _refuse_oracle(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
    raise UserError(
        "stopper oracle needs a recorded run (it knows the target's greedy tokens in advance): "
        "it is for analysis in Python, draftproof.stoppers.history.Oracle"
    )


def _auto(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
    """The length by the cost model: at a draft pass's share of a target pass, or at what is measured here."""
    if not argument:
        return Auto()
    share = _number(argument, "auto:0.1")
    if not 0 <= share < math.inf:
        raise UserError(
            f"stopper auto takes a draft pass's cost in target passes, not {argument}: for example auto:0.1"
        )
    return Auto(RoundCosts(target=1.0, draft=share), name=f"auto:{share:g}")


STOPPERS: dict[str, StopperPart] = {
    part.name: part
    for part in (
        StopperPart(
            name="auto",
            argument="R",
            example="auto:0.1",
            about="as many tokens as pay, by measured costs (or with a draft pass at R target passes) and acceptance",
            make=_auto,
        ),
        StopperPart(
            name="fixed",
            argument="N",
            example="fixed:4",
            about="N tokens every round",
            make=_length(lambda length=4: FixedLength(length), "fixed:4"),
            constant=True,
        ),
        StopperPart(
            name="schedule",
            argument="N",
            example="schedule:5",
            about="N tokens at first; two more after a draft that was accepted whole, one less after any other",
            make=_length(Schedule, "schedule:5"),
        ),
        StopperPart(
            name="confidence",
            argument="T",
            example="confidence:0.4",
            about="until the draft model's largest probability is below T",
            make=_threshold(Confidence, "confidence:0.4"),
        ),
        StopperPart(
            name="entropy",
            argument="T",
            example="entropy:0.4",
            about="until the entropy's bound on acceptance is below a threshold that starts at T (AdaEDL)",
            make=_threshold(Entropy, "entropy:0.4"),
        ),
        StopperPart(
            name="acceptance",
            argument="DIR:H",
            example="acceptance:heads/mine:0.7",
            about="until a rejection is predicted with a probability above H (SpecDec++)",
            make=_headed(Acceptance, "acceptance:heads/mine:0.7"),
            head="acceptance",
        ),
        StopperPart(
            name="ratio",
            argument="DIR:H",
            example="ratio:heads/mine:0.7",
            about="until the predicted running probability of block verification is below 1 - H",
            make=_headed(Ratio, "ratio:heads/mine:0.7"),
            head="log_ratio",
        ),
        StopperPart(
            name="approximate",
            argument="DIR:T",
            example="approximate:heads/mine:0.5",
            about="until a small verifier refuses a token: its probability is at most T (SPRINTER)",
            make=_headed(Approximate, "approximate:heads/mine:0.5"),
            head="verifier",
        ),
        StopperPart(
            name="oracle",
            about="up to the next rejection, by hindsight on a recorded run; for analysis in Python",
            make=_refuse_oracle,
            offered=False,
        ),
    )
}
OFFERED_STOPPERS = {name: part for name, part in STOPPERS.items() if part.offered}


# --- verifiers --------------------------------------------------------------------------------------------------------


def _rule(make: Callable[..., Verifier], about: str, *, argument: str = "", example: str = "") -> VerifierPart:
    """A rule; its traits are those of what `make` makes."""
    made = make()

    def build(given: str) -> Verifier:
        if not given:
            return make()
        if not argument:
            raise UserError(f"verifier {made.name} takes no parameter, and was given {given!r}")
        return make(_number(given, example))

    name = made.name.partition(":")[0]
    traits = VerifierTraits(name, made.branching, made.point_masses, made.constant_length, made.shared_noise)
    return VerifierPart(
        name=name, about=about, argument=argument, example=example, make=build, traits=traits, lossless=made.lossless
    )


VERIFIERS: dict[str, VerifierPart] = {
    part.name: part
    for part in (
        _rule(block_verifier, "keeps the longest prefix that passes a joint test; never worse than token"),
        _rule(token_verifier, "keeps each token with min(1, p/q) until the first refusal"),
        _rule(GreedyBlockVerifier, "as block, with a memory; constant lengths only"),
        _rule(match_verifier, "draws from the target and keeps the draft while it is the same"),
        _rule(gumbel_verifier, "as match, with the draft's random numbers: a seed gives one text, whatever drafts"),
        _rule(trie_block_verifier, "block verification of several drafts: SpecTr's coupling inside it"),
        _rule(spectr_verifier, "SpecTr: K-SEQ at each place of several drafts"),
        _rule(multi_round_verifier, "SpecInfer's recursive rejection of several drafts"),
        _rule(traversal_verifier, "the bottom-up form of multi_round"),
        _rule(multi_path_verifier, "the best of several drafts by p/q, verified as one block"),
        _rule(last_token_verifier, "lossy, SPRINTER's rule: only the last drafted token is verified"),
        _rule(
            typical_verifier,
            "lossy: keeps tokens that the target finds plausible",
            argument="EPSILON",
            example="typical:0.09",
        ),
        _rule(
            mixture_verifier,
            "lossy: the mixture (1 - EPSILON) p + EPSILON q",
            argument="EPSILON",
            example="mixture:0.1",
        ),
        _rule(
            mentored_verifier,
            "lossy: as much acceptance as BUDGET nats of divergence allow",
            argument="BUDGET",
            example="mentored:0.1",
        ),
    )
}
LOSSY = tuple(name for name, part in VERIFIERS.items() if not part.lossless)


# --- from names -------------------------------------------------------------------------------------------------------


def find_drafter(spec: str) -> tuple[DrafterPart, str]:
    """The part that "name" or "name:argument" names, and the argument.

    Raises:
        UserError: unknown name.
    """
    name, _, argument = spec.partition(":")
    if name not in DRAFTERS:
        raise UserError(f"drafter is {name!r}: legal are {', '.join(part.form for part in DRAFTERS.values())}")
    return DRAFTERS[name], argument


def reads_draft(spec: str | None) -> bool:
    """Whether a drafter reads a draft model where there is one; without a name the default drafter.

    Raises:
        UserError: unknown name.
    """
    part = find_drafter(spec or DEFAULT_DRAFTER)[0]
    return part.reads_draft or part.takes_draft


def find_stopper(spec: str) -> tuple[StopperPart, str]:
    """The part that "name" or "name:argument" names, and the argument.

    Raises:
        UserError: unknown name.
    """
    name, _, argument = spec.partition(":")
    if name not in STOPPERS:
        forms = ", ".join(part.form for part in OFFERED_STOPPERS.values())
        raise UserError(f"stopper is {name!r}: legal are {forms} (the argument may be left out)")
    return STOPPERS[name], argument


def find_verifier(spec: str) -> tuple[VerifierPart, str]:
    """The part that "name" or "name:parameter" names, and the parameter.

    Raises:
        UserError: unknown name.
    """
    name, _, argument = spec.partition(":")
    if name not in VERIFIERS:
        lossless = ", ".join(known for known in VERIFIERS if known not in LOSSY)
        raise UserError(f"verifier is {name!r}: legal are {lossless}, and the lossy {', '.join(LOSSY)}")
    return VERIFIERS[name], argument


def why_not(drafter: str, stopper: str | None, verifier: str) -> str | None:
    """Why parts of these names do not compose, in the engine's words; None where they do. Nothing is loaded.

    Raises:
        UserError: unknown names.
    """
    part, argument = find_drafter(drafter)
    ends = find_stopper(stopper)[0] if stopper else None
    rule = find_verifier(verifier)[0]
    if stopper and not part.stops:
        return f"drafter {part.name} takes no stopper"
    return misfit(part.traits(argument, ends), rule.traits)


def make_stopper(spec: str, draft: str | None = None) -> Stopper:
    """A stopper from "name" or "name:argument".

    Args:
        spec: a name of STOPPERS, with its argument.
        draft: name of the draft model, or the drafter's where it has none, for stoppers whose head ships for it.

    Raises:
        UserError: unknown name or a bad argument.
    """
    part, argument = find_stopper(spec)
    return part.make(argument, draft)


def default_stopper(rule: Verifier | None) -> str:
    """The stopper of an engine for which none is named: what pays, or a constant length where the rule needs one."""
    return DEFAULT_CONSTANT_STOPPER if rule is not None and rule.constant_length else DEFAULT_STOPPER


def make_verifier(spec: str) -> Verifier:
    """A verification rule from "name" or "name:parameter".

    Raises:
        UserError: unknown name or a bad parameter.
    """
    part, argument = find_verifier(spec)
    return part.make(argument)


def make_drafter(
    name: str | None,
    *,
    target: Backend,
    draft: Backend | None,
    stopper: str,
    temperature: float | None = None,
    top_k: int | None = None,
    bits: int | None = None,
    rule: Verifier | None = None,
) -> Drafter:
    """A drafter by name; without a name, what is at hand for the target (`auto`).

    Args:
        name: with its argument.
        target: loaded.
        draft: loaded, where there is one; with quantized weights if `bits` is given.
        stopper: a specification.
        temperature: of the draft; None for the request's.
        top_k: of the draft; None for the request's.
        bits: of quantized weights of the draft model or the head; None for weights of a float type.
        rule: that will verify, where it is known.

    Raises:
        UserError: unknown name, a draft model missing or left over, or bits where nothing has weights of its own.
    """
    spec = name or DEFAULT_DRAFTER
    part, argument = find_drafter(spec)
    if part.reads_draft and draft is None:
        raise UserError(f"drafter {part.name} needs a draft model: name one with draft (--draft)")
    if not (part.reads_draft or part.takes_draft) and draft is not None and part.name != "none":
        raise UserError(
            f"drafter {part.name} reads no draft model: leave out {draft.name!r}, or choose another drafter"
        )
    heads = part.name == "feature_head" or (part.takes_draft and target.name in SHIPPED_FEATURE_HEADS)
    if bits is not None and draft is None and not heads:
        raise UserError(
            f"draft_dtype int{bits} is for a draft model or a feature head, and drafter {spec} has none: leave it out, "
            f"or choose drafter quantized:{bits}, the target with such weights"
        )
    changes = {"temperature": temperature, "top_k": top_k}
    return part.make(Materials(target, draft, stopper, spec, changes, bits, rule), argument)
