"""Rules of other packages, as installed here, with our signature, so that they can be enumerated too.

Every report states the version of the package. The rules are private functions; if one is missing in another version,
the report says so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.audit.check import CheckLine, enumerated
from draftproof.audit.distributions import all_drafts, as_paths
from draftproof.audit.suite import suite
from draftproof.functional.chain import ChainVerdict
from draftproof.rng import Rng

ROUNDED = 1e-6  # total variation that rounding to float32 may cause


@dataclass(frozen=True)
class Report:
    """The audit of one package.

    Attributes:
        package: name of the package.
        version: installed version; None when it is not installed.
        rule: the audited function.
        status: "ok", "FAIL", "not installed" or why the rule was not audited.
        lines: results in float64, one for each pair.
        rounded: results in float32, one for each pair.
        notes: further findings.
    """

    package: str
    version: str | None
    rule: str
    status: str
    lines: list[CheckLine] = field(default_factory=list)
    rounded: list[CheckLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as values for JSON."""
        names = {"kind": "package", "package": self.package, "version": self.version, "rule": self.rule}
        lines = {"float64": self.lines, "float32": self.rounded}
        models = {name: [line.to_dict() for line in found] for name, found in lines.items()}
        return {**names, "status": self.status, "notes": self.notes, **models}


class _Uniforms:
    """In place of a tensor of uniforms that is only compared: each comparison is a draw of our Rng."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def __le__(self, prob: Tensor) -> Tensor:
        return self._rng.bernoulli(prob.clamp(max=1))

    __lt__ = __le__


@contextmanager
def drawing_from(rng: Rng) -> Iterator[None]:
    """Make torch.rand_like and torch.multinomial draw from our Rng, within the block."""

    def multinomial(weights: Tensor, num_samples: int = 1, **_: Any) -> Tensor:
        assert num_samples == 1, f"{num_samples} draws per row: only one can be enumerated"
        return rng.categorical(weights).unsqueeze(-1)

    with _patched(rand_like=lambda *_, **__: _Uniforms(rng), multinomial=multinomial):
        yield


@contextmanager
def _patched(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of torch within the block."""
    before = {name: getattr(torch, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(torch, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


TRANSFORMERS = "transformers.generation.utils._speculative_sampling"


def _speculative_sampling() -> Callable[..., Any]:
    module: Any = importlib.import_module("transformers.generation.utils")
    found: Callable[..., Any] = module._speculative_sampling  # noqa: SLF001 - the rule has no public name
    return found


def transformers_verify(
    tokens: Int[Tensor, "1 n"], q: Float[Tensor, "1 n V"], p: Float[Tensor, "1 n+1 V"], *, rng: Rng
) -> ChainVerdict:
    """transformers' speculative sampling as a chain rule; it is written for one row."""
    rule = _speculative_sampling()
    with drawing_from(rng):
        emitted, matches = rule(tokens, q.log(), tokens.shape[1], p.log())
    return ChainVerdict(matches.reshape(1), emitted[:, -1])


def _accepts_the_impossible() -> bool:
    """Whether a drafted token with p = 0 is accepted when the uniform is exactly 0."""
    q, p = torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([[[0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]])
    rule = _speculative_sampling()
    with _patched(rand_like=torch.zeros_like):
        _, matches = rule(torch.tensor([[0]]), q.log(), 1, p.log())
    return int(matches) > 0


def audit_transformers(*, full: bool = False) -> Report:
    """Enumerate transformers' speculative sampling on the suite, in float64 and in float32."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return Report("transformers", None, TRANSFORMERS, "not installed")
    try:
        _speculative_sampling()
    except (ImportError, AttributeError) as error:
        return Report("transformers", version, TRANSFORMERS, f"not audited: {error}")
    rule = as_paths(transformers_verify)
    lines, rounded = [], []
    for pair in suite(full=full):
        lines.append(enumerated(rule, pair, all_drafts(pair, 1, 3)))
        single = replace(pair, dtype=torch.float32)
        rounded.append(enumerated(rule, single, all_drafts(single, 1, 3), ROUNDED))
    good = all(line.verdict == "ok" for line in (*lines, *rounded))
    return Report("transformers", version, TRANSFORMERS, "ok" if good else "FAIL", lines, rounded, _notes(rounded))


def _notes(rounded: list[CheckLine]) -> list[str]:
    notes = []
    for line in rounded:
        notes += [f"float32, {line.model}: {why} (probability {x:.2g})" for why, x in line.failures.items() if x > 0]
    if _accepts_the_impossible():
        notes.append(
            "a uniform of exactly 0 (one float32 uniform in 2^24) accepts a token with target probability 0, because "
            "the comparison is not strict; the enumeration treats uniforms as continuous and does not count this"
        )
    return notes


ADAPTERS: dict[str, Callable[..., Report]] = {"transformers": audit_transformers}
