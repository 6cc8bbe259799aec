"""What is asked of a benchmark, by options or by a profile.

Knows: names of fields, the pairs and sizes of the profiles. Does not know: cells, models, what is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from draftproof import models
from draftproof.errors import UserError


@dataclass(frozen=True)
class BenchOptions:
    """What was said; None where nothing was.

    Attributes:
        target, draft: models.
        dtype, backend, drafter, stopper, verifier, temperature, top_k, top_p, seed: lists, of `Cell`'s fields.
        competitor: other engines.
        dataset: names that `read_questions` knows.
        questions: of each data set.
        max_tokens: of an answer.
        repeats: of each answer.
    """

    target: str | None = None
    draft: str | None = None
    dtype: Sequence[str] | None = None
    backend: Sequence[str] | None = None
    drafter: Sequence[str] | None = None
    stopper: Sequence[str] | None = None
    verifier: Sequence[str] | None = None
    temperature: Sequence[float] | None = None
    top_k: Sequence[int] | None = None
    top_p: Sequence[float] | None = None
    seed: Sequence[int] | None = None
    competitor: Sequence[str] | None = None
    dataset: Sequence[str] | None = None
    questions: int | None = None
    max_tokens: int | None = None
    repeats: int | None = None

    def over(self, other: BenchOptions) -> BenchOptions:
        """These wishes, and another's where these are silent."""
        given = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}
        return replace(other, **given)


DRAFTS = {"embedded:target": "embedded:draft", "embedded:stories": "embedded:stories-draft"}  # where none is named
DEFAULTS = BenchOptions(
    target="embedded:target",
    dtype=("auto",),
    backend=("auto",),
    drafter=("model",),
    stopper=("fixed:4",),
    verifier=("",),
    temperature=(0.0, 1.0),
    top_k=(0,),
    top_p=(1.0,),
    seed=(1,),
    competitor=(),
    dataset=("tinystories",),
    questions=8,
    max_tokens=48,
    repeats=3,
)


@dataclass(frozen=True)
class BenchProfile:
    """What is measured where only little is said.

    Attributes:
        about: in a few words.
        sizes: of a run on a target that the user names.
        embedded: on the pair inside the package: what all its parts share, and the parts.
        pulled: on SmolLM2-135M, where it was pulled: likewise.
    """

    about: str
    sizes: BenchOptions
    embedded: tuple[BenchOptions, tuple[BenchOptions, ...]]
    pulled: tuple[BenchOptions, tuple[BenchOptions, ...]]


def _parts(lengths: Sequence[int], drafts: Sequence[int]) -> tuple[BenchOptions, ...]:
    """Rules by length, drafts by number, stopping rules with heads that ship, and what a lossy rule gains."""
    fixed = tuple(f"fixed:{length}" for length in lengths)
    chains = tuple(f"chains:{count}" for count in drafts)
    return (
        BenchOptions(drafter=("model",), stopper=fixed, verifier=("token", "block")),
        BenchOptions(drafter=chains, stopper=("fixed:4",), verifier=("spectr", "trie_block")),
        BenchOptions(drafter=("model",), stopper=("fixed:2", "acceptance"), verifier=("block",)),
        BenchOptions(drafter=("model",), stopper=("approximate",), verifier=("block", "last_token")),
    )


_SMOL = BenchOptions(target="smollm2-135m", draft="smollm2-135m-draft", dtype=("bfloat16",))
_EMBEDDED = BenchOptions(target="embedded:target", draft="embedded:draft", dataset=("tinystories",))
_OTHERS = ("transformers", "transformers-assisted")
_SMOL_PARTS = (
    BenchOptions(drafter=("model",), stopper=("fixed:4",), verifier=("token", "block")),
    BenchOptions(drafter=("ngram:8",), verifier=("block",)),
)
PROFILES = {
    "quick": BenchProfile(
        "under ten minutes on two quiet cores",
        BenchOptions(dataset=("mt-bench", "gsm8k"), questions=6, max_tokens=32, repeats=1, competitor=_OTHERS),
        (
            BenchOptions(
                temperature=(1.0,),
                seed=(1, 2),
                competitor=_OTHERS,
                questions=12,
                max_tokens=64,
                repeats=1,
            ).over(_EMBEDDED),
            _parts((4, 8), (2, 4)),
        ),
        (
            BenchOptions(
                dataset=("mt-bench", "gsm8k"),
                temperature=(0.0, 1.0),
                competitor=_OTHERS,
                questions=6,
                max_tokens=32,
                repeats=1,
            ).over(_SMOL),
            _SMOL_PARTS,
        ),
    ),
    "full": BenchProfile(
        "all data sets, lengths, numbers of drafts and temperatures: hours",
        BenchOptions(
            dataset=("mt-bench", "gsm8k", "humaneval", "self-instruct", "vicuna-bench", "fiction"),
            temperature=(0.0, 0.6, 1.0),
            questions=16,
            max_tokens=128,
            repeats=3,
            competitor=(*_OTHERS, "transformers-lookup"),
        ),
        (
            BenchOptions(
                temperature=(0.0, 0.2, 0.6, 1.0),
                seed=(1, 2, 3, 4),
                competitor=(*_OTHERS, "transformers-lookup"),
                questions=16,
                max_tokens=128,
                repeats=3,
            ).over(_EMBEDDED),
            _parts((4, 6, 8), (2, 4, 8)),
        ),
        (
            BenchOptions(
                dataset=("mt-bench", "gsm8k", "humaneval", "self-instruct", "vicuna-bench", "fiction"),
                temperature=(0.0, 0.6, 1.0),
                competitor=(*_OTHERS, "transformers-lookup"),
                questions=16,
                max_tokens=128,
                repeats=3,
            ).over(_SMOL),
            (*_SMOL_PARTS, BenchOptions(drafter=("chains:2", "chains:4"), verifier=("spectr", "trie_block"))),
        ),
    ),
}


def parts(wanted: BenchOptions, profile: str | None) -> tuple[list[BenchOptions], list[str]]:
    """What shall be measured, each complete, and what was left out.

    Args:
        wanted: what was said; it rules over the profile.
        profile: a name of PROFILES.

    Raises:
        UserError: no such profile.
    """
    if profile is not None and profile not in PROFILES:
        raise UserError(f"profile is {profile!r}: legal are {', '.join(PROFILES)}")
    if profile is None or wanted.target is not None:
        sizes = BenchOptions() if profile is None else PROFILES[profile].sizes
        return [_complete(wanted.over(sizes))], []
    chosen, notes = [PROFILES[profile].embedded], []
    missing = [name for name in (_SMOL.target, _SMOL.draft) if not models.pulled(str(name))]
    if missing:
        notes.append(f"left out {_SMOL.target}: draftproof models pull {missing[0]} has not been run")
    else:
        chosen.append(PROFILES[profile].pulled)
    return [_complete(wanted.over(part).over(common)) for common, own in chosen for part in own], notes


def _complete(wanted: BenchOptions) -> BenchOptions:
    made = wanted.over(DEFAULTS)
    return replace(made, draft=made.draft or DRAFTS.get(made.target or ""))
