"""Names to parts: the one file that knows every drafter, stopper and rule, and what each is made of.

Knows: names, arguments, which part needs what. Does not know: how models are loaded, how a round goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.backends.base import Backend
from draftproof.backends.feature_net import load_net
from draftproof.backends.slots import SlotBackend
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.early_exit import EarlyExitModel, early_exit_drafter
from draftproof.drafters.feature_head import FeatureModel, feature_drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.embedded import heads_dir, stories_heads_dir
from draftproof.errors import UserError
from draftproof.heads import Head, load_head
from draftproof.stoppers.auto import Auto
from draftproof.stoppers.base import Stopper
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.history import Schedule
from draftproof.stoppers.probability import Confidence, Entropy
from draftproof.stoppers.trained import Acceptance, Approximate, Ratio
from draftproof.theory.cost import RoundCosts
from draftproof.verifiers.base import Verifier
from draftproof.verifiers.chain import block_verifier, match_verifier, token_verifier
from draftproof.verifiers.greedy import GreedyBlockVerifier
from draftproof.verifiers.lossy import last_token_verifier, mentored_verifier, mixture_verifier, typical_verifier
from draftproof.verifiers.trie import (
    multi_round_verifier,
    spectr_verifier,
    traversal_verifier,
    trie_block_verifier,
)

DEFAULT_STOPPER, DEFAULT_CONSTANT_STOPPER = "auto", "fixed:4"
DEFAULT_VERIFIER = "block"
DEFAULT_TREE_VERIFIER = "trie_block"


StopperMaker = Callable[[str, str | None], Stopper]  # from the argument and the name of the draft model
SHIPPED_HEADS = {  # by draft model; in each a directory named as the stopper
    "embedded:draft": heads_dir(),
    "embedded:stories-draft": stories_heads_dir(),
}
OWN_HEADS = "heads"  # a feature head's directory may hold such a directory of its own


def _length(make: Callable[..., Stopper], example: str) -> StopperMaker:
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


def _threshold(make: Callable[..., Stopper]) -> StopperMaker:
    """A stopper with a threshold as its argument."""

    def build(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
        return make(_number(argument, "confidence:0.4")) if argument else make()

    return build


def _headed(make: Callable[[Head, float | None], Stopper], example: str) -> StopperMaker:
    """A stopper with a trained head: its directory, and a threshold if wanted; default the draft's own shipped head."""
    name = example.partition(":")[0]

    def build(argument: str, draft: str | None) -> Stopper:
        where, _, last = argument.rpartition(":")
        path, threshold = (where, last) if _is_number(last) else (argument, "")
        shelf = None if path else _shelf(draft)
        if shelf is not None:
            path = str(shelf / name) if (shelf / name).is_dir() else ""
        if not path:
            raise UserError(
                f"stopper {name} needs the directory of a head, for example {example}: none ships for the draft model "
                f"{draft!r} (legal without one are {', '.join(SHIPPED_HEADS)}); draftproof train makes heads"
            )
        return make(load_head(path), float(threshold) if threshold else None)

    return build


def _shelf(draft: str | None) -> Path | None:
    """Where the heads lie that ship for a draft model, or for a feature head beside its own files."""
    kind, _, argument = (draft or "").partition(":")
    return _directory(argument)[0] / OWN_HEADS if kind == "feature_head" else SHIPPED_HEADS.get(draft or "")


def _directory(argument: str) -> tuple[Path, str]:
    """The directory of DIR or DIRxK, and K."""
    where, _, chains = argument.rpartition("x")
    if Path(argument).expanduser().exists() or not where or not chains.isdecimal():
        where, chains = argument, "1"
    return Path(where).expanduser(), chains


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text!r} is no number: legal is for example {example}") from None


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


STOPPERS: dict[str, StopperMaker] = {
    "fixed": _length(lambda length=4: FixedLength(length), "fixed:4"),
    "confidence": _threshold(Confidence),
    "entropy": _threshold(Entropy),
    "schedule": _length(Schedule, "schedule:5"),
    "auto": _auto,
    "acceptance": _headed(Acceptance, "acceptance:heads/mine:0.7"),
    "ratio": _headed(Ratio, "ratio:heads/mine:0.7"),
    "approximate": _headed(Approximate, "approximate:heads/mine:0.5"),
    "oracle": _refuse_oracle,
}


def _plain(make: Callable[[], Verifier]) -> Callable[[str], Verifier]:
    """A rule without a parameter."""

    def build(argument: str) -> Verifier:
        if argument:
            raise UserError(f"verifier {make().name} takes no parameter, and was given {argument!r}")
        return make()

    return build


def _tuned(make: Callable[..., Verifier]) -> Callable[[str], Verifier]:
    """A rule with one number as its parameter."""

    def build(argument: str) -> Verifier:
        return make(_number(argument, "mixture:0.1")) if argument else make()

    return build


VERIFIERS: dict[str, Callable[[str], Verifier]] = {
    "block": _plain(block_verifier),
    "token": _plain(token_verifier),
    "greedy_block": _plain(GreedyBlockVerifier),
    "match": _plain(match_verifier),
    "trie_block": _plain(trie_block_verifier),
    "spectr": _plain(spectr_verifier),
    "multi_round": _plain(multi_round_verifier),
    "traversal": _plain(traversal_verifier),
    "last_token": _plain(last_token_verifier),
    "typical": _tuned(typical_verifier),
    "mixture": _tuned(mixture_verifier),
    "mentored": _tuned(mentored_verifier),
}
LOSSY = ("last_token", "typical", "mixture", "mentored")
DRAFTERS = {
    "none": "nothing is drafted: plain decoding",
    "model": "one chain from the draft model",
    "chains:K": "K i.i.d. chains from the draft model, equal prefixes merged",
    "tree:AxBxC": "a prefix tree from the draft model: A draws at the root, B at each of its nodes, ...",
    "early_exit:L": "one chain from the target's own first L layers; early_exit:LxK makes K i.i.d. chains",
    "feature_head:DIR": "one chain from a trained layer over the target's states; feature_head:DIRxK makes K chains",
    "ngram:N": "up to N tokens that followed an earlier occurrence of the last ones; no draft model",
    "suffix:N": "up to N tokens that most often followed the longest suffix known from this and other requests",
}


def make_stopper(spec: str, draft: str | None = None) -> Stopper:
    """A stopper from "name" or "name:argument".

    Args:
        spec: a name of STOPPERS, with its argument.
        draft: name of the draft model, or the drafter's where it has none, for stoppers whose head ships for it.

    Raises:
        UserError: unknown name or a bad argument.
    """
    name, _, argument = spec.partition(":")
    if name not in STOPPERS:
        raise UserError(f"stopper is {name!r}: legal are {', '.join(STOPPERS)} (as name:argument, for example fixed:4)")
    return STOPPERS[name](argument, draft)


def default_stopper(rule: Verifier | None) -> str:
    """The stopper of an engine for which none is named: what pays, or a constant length where the rule wants one."""
    return DEFAULT_CONSTANT_STOPPER if rule is not None and rule.constant_length else DEFAULT_STOPPER


def make_verifier(spec: str) -> Verifier:
    """A verification rule from "name" or "name:parameter".

    Raises:
        UserError: unknown name or a bad parameter.
    """
    name, _, argument = spec.partition(":")
    if name not in VERIFIERS:
        lossless = ", ".join(known for known in VERIFIERS if known not in LOSSY)
        raise UserError(f"verifier is {name!r}: legal are {lossless}, and the lossy {', '.join(LOSSY)}")
    return VERIFIERS[name](argument)


def make_drafter(
    name: str | None,
    *,
    target: Backend,
    draft: Backend | None,
    stopper: str,
    temperature: float | None = None,
    top_k: int | None = None,
) -> Drafter:
    """A drafter by name; without a name, `model` when there is a draft model and `none` otherwise.

    Raises:
        UserError: unknown name, or a draft model missing or left over.
    """
    spec = name or ("none" if draft is None else "model")
    chosen, _, argument = spec.partition(":")
    if chosen == "none":
        return NoDrafter()
    if chosen not in _DRAFTER_MAKERS:
        raise UserError(f"drafter is {chosen!r}: legal are {', '.join(DRAFTERS)}")
    needs_draft, make = _DRAFTER_MAKERS[chosen]
    if needs_draft and draft is None:
        raise UserError(f"drafter {chosen} needs a draft model: name one with draft (--draft)")
    if not needs_draft and draft is not None:
        raise UserError(f"drafter {chosen} reads no draft model: leave out {draft.name!r}, or choose another drafter")
    return make(_Parts(target, draft, spec, stopper, {"temperature": temperature, "top_k": top_k}), argument)


@dataclass(frozen=True)
class _Parts:
    """What a drafter may be made of."""

    target: Backend
    draft: Backend | None
    drafter: str
    stopper: str
    changes: dict[str, Any]

    def ends(self) -> Stopper:
        """The stopper."""
        return make_stopper(self.stopper, self.drafter if self.draft is None else self.draft.name)

    def model(self) -> DraftModel:
        """The draft model."""
        assert self.draft is not None, "checked by make_drafter"
        return DraftModel(self.draft, vocab_size=self.target.vocab_size, **self.changes)


def _model(parts: _Parts, argument: str) -> Drafter:
    if argument:
        raise UserError(f"drafter model takes no argument, and was given {argument!r}")
    return ModelDrafter(parts.model(), parts.ends())


def _chains(parts: _Parts, argument: str) -> Drafter:
    chains = (numbers(argument, "chains:4") or [4])[0]
    return SampledTreeDrafter(parts.model(), parts.ends(), chains=chains)


def _tree(parts: _Parts, argument: str) -> Drafter:
    factors = numbers(argument, "tree:4x2x1") or [4, 2, 1, 1]
    return SampledTreeDrafter(parts.model(), parts.ends(), factors=factors)


def _early_exit(parts: _Parts, argument: str) -> Drafter:
    found = numbers(argument, "early_exit:20x4")
    if not 1 <= len(found) <= 2:
        raise UserError("drafter early_exit takes a number of layers: legal is for example early_exit:20")
    if not isinstance(parts.target, SlotBackend):
        raise UserError(f"drafter early_exit needs a transformers model, and {parts.target.name} is none")
    model = EarlyExitModel(parts.target, found[0], **parts.changes)
    return early_exit_drafter(model, parts.ends(), chains=found[1] if len(found) > 1 else 1)


def _feature_head(parts: _Parts, argument: str) -> Drafter:
    if not argument:
        raise UserError("drafter feature_head takes the directory of one: for example feature_head:heads/mine")
    if not isinstance(parts.target, SlotBackend):
        raise UserError(f"drafter feature_head needs a transformers model, and {parts.target.name} is none")
    where, chains = _directory(argument)
    model = FeatureModel(parts.target, load_net(where), **parts.changes)
    return feature_drafter(model, parts.ends(), chains=int(chains))


def _lookup(make: Callable[..., Drafter], example: str) -> Callable[[_Parts, str], Drafter]:
    """A drafter that reads tokens only, with its longest draft as its argument."""

    def build(parts: _Parts, argument: str) -> Drafter:  # noqa: ARG001
        found = numbers(argument, example)
        if len(found) > 1:
            raise UserError(f"{argument!r} is not one whole number: legal is for example {example}")
        return make(*found)

    return build


# name -> whether it reads a draft model, and its maker
_DRAFTER_MAKERS: dict[str, tuple[bool, Callable[[_Parts, str], Drafter]]] = {
    "model": (True, _model),
    "chains": (True, _chains),
    "tree": (True, _tree),
    "early_exit": (False, _early_exit),
    "feature_head": (False, _feature_head),
    "ngram": (False, _lookup(NgramDrafter, "ngram:8")),
    "suffix": (False, _lookup(SuffixDrafter, "suffix:16")),
}


def numbers(text: str, example: str) -> list[int]:
    """Whole numbers joined by x, such as "4x2x1"; none in an empty text.

    Raises:
        UserError: something else.
    """
    try:
        return [int(part) for part in text.split("x")] if text else []
    except ValueError:
        raise UserError(f"{text!r} is not a row of whole numbers: legal is for example {example}") from None
