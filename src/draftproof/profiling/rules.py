"""The time of each verification rule, relative to one softmax over the target's rows, and its memory.

In each repetition the softmax and all rules run one after another on the same rows. Ratios are of one repetition.
Memory is the growth of the process's peak during one call, in units of the rows of p.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.errors import UserError, refuse_below_one
from draftproof.functional import (
    ChainVerdict,
    PathVerdict,
    block_verify,
    match_verify,
    multi_path_verify,
    multi_round_verify,
    spectr_verify,
    token_verify,
    traversal_verify,
    trie_block_verify,
)
from draftproof.functional.lossy import last_token_verify, typical_verify
from draftproof.peak import Peak
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.rng import NoiseRoundRng, Purpose, TorchRng

SOFTMAX = "softmax"


def _gumbel(
    tokens: Int[Tensor, "B n"], q: Float[Tensor, "B n V"], p: Float[Tensor, "B m V"], **options: Any
) -> ChainVerdict:
    """The rule `gumbel`: match verification with noise of its own."""
    noise = NoiseRoundRng(range(len(tokens)), [0] * len(tokens)).at(Purpose.VERIFY)
    return match_verify(tokens, q, p, **options | {"rng": noise})


CHAIN: dict[str, Callable[..., ChainVerdict]] = {
    "token": token_verify,
    "block": block_verify,
    "match": match_verify,
    "gumbel": _gumbel,
    "last_token (lossy)": last_token_verify,
    "typical (lossy)": typical_verify,
}
SEVERAL: dict[str, Callable[..., PathVerdict]] = {
    "spectr": spectr_verify,
    "multi_round": multi_round_verify,
    "traversal": traversal_verify,
    "trie_block": trie_block_verify,
    "multi_path": multi_path_verify,
}
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class RuleSizes:
    """The sizes at which rules are measured; all combinations of the lists.

    Attributes:
        vocab: size of the vocabulary.
        batch: requests together.
        drafts: number of drafts; rules for one draft are measured at 1 draft only.
        length: draft length.
        repeats: calls of each rule that count.
    """

    vocab: Sequence[int] = (32000, 151936, 262144)
    batch: Sequence[int] = (1, 8)
    drafts: Sequence[int] = (1, 4)
    length: int = 8
    repeats: int = 7

    def __post_init__(self) -> None:
        refuse_below_one(batch=min(self.batch), drafts=min(self.drafts), n=self.length, repeats=self.repeats)
        if min(self.vocab) < 2:
            raise UserError(f"vocab: expected 2 or more, got {min(self.vocab)}")


def measure_rules(sizes: RuleSizes, *, watch: Watch = silent) -> Results:
    """Time and memory of every rule at every size."""
    facts = run_facts()
    combinations = list(itertools.product(sizes.vocab, sizes.batch, sizes.drafts))
    rows: list[dict[str, Any]] = []
    with watch("measuring", len(combinations), 0) as tick:
        for number, (vocab, batch, drafts) in enumerate(combinations, 1):
            rows += _one_size(batch, drafts, sizes.length, vocab, sizes.repeats)
            tick(number)
    return Results("The time of each rule", _lines(sizes, rows), {"sizes": asdict(sizes), "rows": rows}, facts)


def _one_size(batch: int, drafts: int, length: int, vocab: int, repeats: int) -> list[dict[str, Any]]:
    calls = _calls(batch, drafts, length, vocab)
    for call in calls.values():
        call()  # warms up: memory that a first call allocates for good is not counted
    memory = {name: _peak_growth(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    p_bytes = batch * drafts * (length + 1) * vocab * 4
    return [
        {"vocab": vocab, "batch": batch, "drafts": drafts, "rule": name}
        | {"seconds": seconds[name], "memory": memory[name] / p_bytes}
        for name in calls
    ]


def _calls(batch: int, drafts: int, length: int, vocab: int) -> Calls:
    """The softmax and every rule on the same rows."""
    logits, q, tokens = _rows(batch, drafts, length, vocab)
    p = logits.softmax(-1)
    calls: Calls = {SOFTMAX: lambda: logits.softmax(-1)}
    if drafts == 1:
        chain = (tokens[:, 0], q[:, 0], p[:, 0])
        for name, verify in CHAIN.items():
            calls[name] = partial(verify, *chain, rng=TorchRng(1), validate=False)
    for name, verify_several in SEVERAL.items():
        calls[name] = partial(verify_several, tokens, q, p, rng=TorchRng(1), validate=False)
    return calls


def _rows(
    batch: int, drafts: int, length: int, vocab: int
) -> tuple[Float[Tensor, "B K m V"], Float[Tensor, "B K n V"], Int[Tensor, "B K n"]]:
    """Logits of the target, q and tokens of a round: peaked rows, the draft model a noisy copy of the target."""
    source = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(batch, drafts, length + 1, vocab, generator=source)
    q = (logits[:, :, :length] + torch.randn(batch, drafts, length, vocab, generator=source)).softmax(-1)
    q[:, :, 0] = q[:, :1, 0]  # all drafts begin in the same context
    logits[:, :, 0] = logits[:, :1, 0]
    return logits, q, TorchRng(0).categorical(q)


def _peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the process's peak memory grows during a call; 0 if the system does not report its size."""
    peak = Peak(torch.device("cpu"))
    call()
    most = peak.stop()
    return 0 if peak.before is None else max(most - peak.before, 0)


def _lines(sizes: RuleSizes, rows: Sequence[dict[str, Any]]) -> list[str]:
    seconds = {(row["vocab"], row["batch"], row["drafts"], row["rule"]): row["seconds"] for row in rows}
    cells = []
    for row in rows:
        size = (row["vocab"], row["batch"], row["drafts"])
        over = [
            [mine / base for mine, base in zip(row["seconds"], seconds[*size, name], strict=True)]
            for name in (SOFTMAX, "token")
            if (*size, name) in seconds
        ]
        token = f"{median(over[1]):.2f}" if len(over) > 1 and row["rule"] != SOFTMAX else "-"
        milliseconds = f"{1000 * median(row['seconds']):.2f}"
        cells.append((*size, row["rule"], milliseconds, median_and_range(over[0]), token, f"{row['memory']:.2f}"))
    heads = ("V", "B", "K", "rule", "ms", "over softmax", "over token", "memory")
    return [
        f"Draft length {sizes.length}, float32, {sizes.repeats} repetitions; medians, with the smallest and the",
        "largest ratio. Memory: growth of the process's peak in a call, in units of the target's rows (the softmax",
        "makes one copy of them: 1.0). Rules for several drafts get K chains; reading and merging their tokens is",
        "included.",
        "",
        *table(heads, cells),
    ]
