"""Names to parts: the one file that knows every drafter, stopper and rule, and loads models for them.

Knows: names, which part needs what. Does not know: how a round goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftproof import models
from draftproof.backends.base import Backend
from draftproof.backends.hf import HFBackend, load_model
from draftproof.drafters.base import Drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.engine.engine import Engine
from draftproof.errors import UserError
from draftproof.stoppers.base import Stopper
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.probability import Confidence, Entropy
from draftproof.tokenization import load_tokenizer, refuse_different
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

DEFAULT_STOPPER = "fixed:4"
DEFAULT_VERIFIER = "block"
DEFAULT_TREE_VERIFIER = "trie_block"


def _fixed(argument: str) -> Stopper:
    try:
        length = int(argument or 4)
    except ValueError:
        raise UserError(f"stopper fixed takes a whole number, not {argument!r}: for example fixed:4") from None
    return FixedLength(length)


def _threshold(make: Callable[..., Stopper]) -> Callable[[str], Stopper]:
    """A stopper with a threshold as its argument."""

    def build(argument: str) -> Stopper:
        return make(_number(argument, "confidence:0.4")) if argument else make()

    return build


def _number(text: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text!r} is no number: legal is for example {example}") from None


STOPPERS: dict[str, Callable[[str], Stopper]] = {
    "fixed": _fixed,
    "confidence": _threshold(Confidence),
    "entropy": _threshold(Entropy),
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
    "ngram:N": "up to N tokens that followed an earlier occurrence of the last ones; no draft model",
}


def make_stopper(spec: str) -> Stopper:
    """A stopper from "name" or "name:argument".

    Raises:
        UserError: unknown name or a bad argument.
    """
    name, _, argument = spec.partition(":")
    if name not in STOPPERS:
        raise UserError(f"stopper is {name!r}: legal are {', '.join(STOPPERS)} (as name:argument, for example fixed:4)")
    return STOPPERS[name](argument)


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
    draft: Backend | None,
    stopper: str,
    vocab_size: int,
    temperature: float | None = None,
    top_k: int | None = None,
) -> Drafter:
    """A drafter by name; without a name, `model` when there is a draft model and `none` otherwise.

    Raises:
        UserError: unknown name, or a draft model missing or left over.
    """
    chosen, _, argument = (name or ("none" if draft is None else "model")).partition(":")
    if chosen == "none":
        return NoDrafter()
    if chosen == "ngram":
        if draft is not None:
            raise UserError(f"drafter ngram reads no draft model: leave out {draft.name!r}, or choose another drafter")
        return NgramDrafter(*numbers(argument, "ngram:8"))
    if chosen not in {"model", "chains", "tree"}:
        raise UserError(f"drafter is {chosen!r}: legal are {', '.join(DRAFTERS)}")
    if draft is None:
        raise UserError(f"drafter {chosen} needs a draft model: name one with draft (--draft)")
    options: dict[str, Any] = {"vocab_size": vocab_size, "temperature": temperature, "top_k": top_k}
    if chosen == "model":
        return ModelDrafter(draft, make_stopper(stopper), **options)
    if chosen == "tree":
        options["factors"] = numbers(argument, "tree:4x2x1") or [4, 2, 1, 1]
    elif argument:
        (options["chains"],) = numbers(argument, "chains:4")[:1]
    return SampledTreeDrafter(draft, make_stopper(stopper), **options)


def numbers(text: str, example: str) -> list[int]:
    """Whole numbers joined by x, such as "4x2x1"; none in an empty text.

    Raises:
        UserError: something else.
    """
    try:
        return [int(part) for part in text.split("x")] if text else []
    except ValueError:
        raise UserError(f"{text!r} is not a row of whole numbers: legal is for example {example}") from None


def load_backend(
    source: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
) -> HFBackend:
    """A backend from a registered name, a hub id, a directory or a .gguf file.

    Raises:
        UserError: not found, broken, or unable to roll back.
    """
    where = models.resolve(source)
    model = load_model(where, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return HFBackend(model, name=source, check=check)


def load(
    target: str,
    draft: str | None = None,
    *,
    drafter: str | None = None,
    verifier: str | None = None,
    stopper: str = DEFAULT_STOPPER,
    dtype: str = "auto",
    device: str | None = None,
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    max_batch: int = 8,
    trust_remote_code: bool = False,
    check: bool = True,
) -> Engine:
    """Build an engine from names.

    Args:
        target: a registered name ("embedded:target", "smollm2-135m"), hub id, directory or .gguf file.
        draft: the draft model, named likewise; its tokenizer must be the target's.
        drafter: a name of DRAFTERS, with its argument; default "model" when a draft is named, else "none".
        verifier: a name of VERIFIERS; default "block", and "trie_block" for drafters of several drafts.
        stopper: when a chain of drafted tokens ends; "fixed:4" is four tokens.
        dtype: "auto", "float32", "bfloat16" or "float16", for both models.
        device: for both models; default an accelerator when there is one.
        draft_temperature: of the draft, when it shall differ from each request's; the output law stays the target's.
        draft_top_k: of the draft, likewise.
        max_batch: sequences decoded together.
        trust_remote_code: run code that comes with a model; off unless asked for.
        check: probe each model for rollback at construction (a few short forward passes).

    Raises:
        UserError: a name that is none, a model that cannot be had, parts that do not fit together.
    """
    several = (drafter or "").partition(":")[0] in {"chains", "tree"}
    rule = make_verifier(verifier or (DEFAULT_TREE_VERIFIER if several else DEFAULT_VERIFIER))
    make_stopper(stopper)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code, "check": check}
    tokenizer = load_tokenizer(models.resolve(target), trust_remote_code=trust_remote_code)
    if draft is not None:
        theirs = load_tokenizer(models.resolve(draft), trust_remote_code=trust_remote_code)
        refuse_different(tokenizer, theirs, target_name=target, draft_name=draft)
    main = load_backend(target, **options)
    small = None if draft is None or drafter == "none" else load_backend(draft, **options)
    parts = make_drafter(
        drafter,
        draft=small,
        stopper=stopper,
        vocab_size=main.vocab_size,
        temperature=draft_temperature,
        top_k=draft_top_k,
    )
    eos = dict.fromkeys((*main.eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])))
    return Engine(main, parts, rule, tokenizer=tokenizer, eos_token_ids=tuple(eos), max_batch=max_batch)
