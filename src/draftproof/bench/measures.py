"""Figures computed from records: pure functions over questions, in pairs where two cells are compared.

Counts are those of the first repeat, because all repeats draw the same tokens. Times use all repeats. Intervals
resample questions (`bootstrap`): they cover other questions of the same kind, not other machines.

Floating-point operations are counted as in SPRINTER (arXiv 2502.04557, A.8), which takes the counting of Hoffmann et
al. (2022), appendix F: two operations for a multiplication and addition; embedding, attention, feed-forward and output
layer. Key and value heads may be fewer than query heads, and a gated feed-forward has three matrices. With a cache each
token attends to those before it, and no token is read twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from draftproof import models
from draftproof.bench.estimate import Estimate, bootstrap
from draftproof.bench.record import Record
from draftproof.engine.drafter_parts import find_drafter
from draftproof.engine.stats import PARTS, Stats, total_stats

Shape = Mapping[str, Any]
_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "codegen", "phi", "falcon")
Paired = dict[str, list[tuple[Record, Record]]]  # by question


def first(records: Iterable[Record]) -> list[Record]:
    """The records of the first repeat."""
    return [record for record in records if record.repeat == 0]


def question_and_seed(record: Record) -> tuple[str, int]:
    """The question with its data set, and the seed; records of two cells are compared if both are equal."""
    return f"{record.cell.dataset}/{record.question}", record.cell.seed


def total(records: Iterable[Record]) -> Stats:
    """Counts and seconds added up."""
    return total_stats(record.stats for record in records)


def _ratio(over: str, under: str) -> Callable[[Sequence[Stats]], float]:
    """The ratio of two sums of counts."""

    def of(rows: Sequence[Stats]) -> float:
        bottom = sum(getattr(row, under) for row in rows)
        return float(sum(getattr(row, over) for row in rows) / bottom) if bottom else math.nan

    return of


def by_question(records: Iterable[Record]) -> list[Stats]:
    """Counts of each question, summed over its seeds; questions are the units that are resampled."""
    found: dict[str, Stats] = {}
    for record in first(records):
        found.setdefault(question_and_seed(record)[0], Stats()).add(record.stats)
    return list(found.values())


def block_efficiency(records: Iterable[Record]) -> Estimate:
    """Tokens per target call; the calls that read prompts are counted too."""
    return bootstrap(by_question(records), _ratio("num_tokens", "num_target_calls"))


def verification_rate(records: Iterable[Record]) -> Estimate:
    """Target calls per token (SpecDec++, arXiv 2405.19715, section 2.3)."""
    return bootstrap(by_question(records), _ratio("num_target_calls", "num_tokens"))


def discard_rate(records: Iterable[Record]) -> Estimate:
    """Discarded drafted tokens per emitted token (SpecDec++, arXiv 2405.19715, section 2.3)."""
    drafted, accepted = _ratio("num_draft_tokens", "num_tokens"), _ratio("num_accepted_tokens", "num_tokens")
    return bootstrap(by_question(records), lambda rows: drafted(rows) - accepted(rows))


def mean_accepted(records: Iterable[Record]) -> Estimate:
    """Accepted tokens per drafted round; nan where nothing was drafted."""
    return bootstrap(by_question(records), _ratio("num_accepted_tokens", "num_drafts"))


def paired(own: Iterable[Record], base: Iterable[Record]) -> Paired:
    """Pairs of records of two cells with the same question, seed and repeat, by question."""
    other = {(*question_and_seed(record), record.repeat): record for record in base}
    found: Paired = {}
    for record in own:
        partner = other.get((*question_and_seed(record), record.repeat))
        if partner is not None:
            found.setdefault(question_and_seed(record)[0], []).append((record, partner))
    return found


def efficiency_ratio(own: Iterable[Record], base: Iterable[Record]) -> Estimate:
    """Block efficiency divided by another cell's, on their common questions, which are resampled together."""
    pairs = paired(first(own), first(base))
    rows = [tuple(total(side) for side in zip(*each, strict=True)) for each in pairs.values()]
    ratio = _ratio("num_tokens", "num_target_calls")

    def statistic(picked: Sequence[tuple[Stats, ...]]) -> float:
        return ratio([row[0] for row in picked]) / ratio([row[1] for row in picked])

    return bootstrap(rows, statistic) if rows else _nothing()


def speed(record: Record) -> float:
    """Tokens a second of one answer; the time is from token ids to text."""
    return record.answer.tokens / record.answer.seconds["total"]


def decoding_speed(record: Record) -> float:
    """Tokens a second of one answer after its first round, which also reads the prompt; NaN if that is not known."""
    answer = record.answer
    tokens, seconds = answer.tokens - answer.first_tokens, answer.seconds["total"] - answer.first_seconds
    return tokens / seconds if answer.first_tokens and tokens and seconds > 0 else math.nan


def speed_ratio(own: Iterable[Record], base: Iterable[Record], of: Callable[[Record], float] = speed) -> Estimate:
    """Tokens a second divided by another cell's: the median over questions of each question's median over its repeats.

    Each ratio is of two answers to one question that were measured one after the other. `of` is the speed of an answer;
    those whose speed is not known are left out.
    """
    pairs = paired(own, base)
    found = [[of(mine) / of(theirs) for mine, theirs in each] for each in pairs.values()]
    known = [[ratio for ratio in each if not math.isnan(ratio)] for each in found]
    ratios = [median(each) for each in known if each]
    return bootstrap(ratios, median) if ratios else _nothing()


def _nothing() -> Estimate:
    return Estimate(math.nan, math.nan, math.nan, 0)


def tokens_per_second(records: Iterable[Record]) -> Estimate:
    """The median over questions of each question's median over its repeats."""
    found: dict[str, list[float]] = {}
    for record in records:
        found.setdefault(question_and_seed(record)[0], []).append(speed(record))
    return bootstrap([median(each) for each in found.values()], median)


def time_split(records: Iterable[Record]) -> dict[str, float] | None:
    """The share of each part in the total time; None for engines that give the total only."""
    records = list(records)
    if any("target" not in record.answer.seconds for record in records):
        return None
    spent = {part: sum(record.answer.seconds[part] for record in records) for part in (*PARTS, "other")}
    return {part: seconds / max(sum(spent.values()), 1e-30) for part, seconds in spent.items()}


def histogram(records: Iterable[Record]) -> list[int]:
    """Drafted rounds by their number of accepted tokens, from 0 on."""
    added: list[int] = []
    for record in first(records):
        pairs = itertools.zip_longest(added, record.accepted_lengths, fillvalue=0)
        added = [here + there for here, there in pairs]
    return added


def acceptance_by_position(records: Iterable[Record]) -> list[float]:
    """For each draft position, the share of emitted tokens among the rounds whose draft reached it."""
    stats = total(first(records))
    pairs = zip(stats.num_accepted_tokens_per_pos, stats.num_drafts_per_pos, strict=False)
    return [accepted / drafted if drafted else math.nan for accepted, drafted in pairs]


def same_tokens(own: Iterable[Record], base: Iterable[Record]) -> tuple[int, int]:
    """How many answers have the same tokens as another cell's, and how many were compared."""
    pairs = [pair for each in paired(first(own), first(base)).values() for pair in each]
    return sum(mine.answer.token_ids == theirs.answer.token_ids for mine, theirs in pairs), len(pairs)


def read_shape(name: str) -> dict[str, Any] | None:
    """A model's sizes; None if its config cannot be read without its weights."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(models.resolve(name), local_files_only=True)
    except (OSError, ValueError):
        return None
    return shape_of(config.get_text_config())


def shape_of(config: Any) -> dict[str, Any]:
    """The sizes of a decoder from its transformers config, as values for JSON."""
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    inner = next((getattr(config, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim")), None)
    return {
        "layers": int(config.num_hidden_layers),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "inner": int(inner or 4 * hidden),
        "gated": str(config.model_type) not in _UNGATED,
        "vocab": int(config.vocab_size),
    }


def pass_flops(shape: Shape, tokens: float, context: float) -> float:
    """Operations to read `tokens` tokens that each attend to `context` positions on average."""
    width, key_width = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    embedding = 2 * shape["vocab"] * shape["hidden"]
    projections = 2 * shape["hidden"] * (2 * width + 2 * key_width)  # query and output, key and value
    attention = 4 * context * width + 3 * shape["heads"] * context  # scores and mixing, softmax
    feed_forward = 2 * shape["hidden"] * shape["inner"] * (3 if shape["gated"] else 2)
    logits = 2 * shape["hidden"] * shape["vocab"]
    return float(tokens * (embedding + shape["layers"] * (projections + attention + feed_forward) + logits))


def answer_flops(record: Record, target: Shape, draft: Shape | None) -> float | None:
    """Operations of one answer; None if the drafter is a part of the target, which this counting does not cover.

    The target reads the prompt, one committed token a call, and every drafted token. The draft model reads the prompt
    and one token for each token that it drafts. Lookup drafters cost nothing.
    """
    answer, prompt = record.answer, record.prompt_tokens
    inside = answer.draft_tokens > 0 and find_drafter(record.cell.drafter)[0].traits.shares_cache
    if inside or (record.cell.draft is not None and draft is None):
        return None
    context = prompt + answer.tokens / 2  # positions that a token of the answer attends to on average
    total = pass_flops(target, float(prompt), prompt / 2)
    total += pass_flops(target, float(answer.target_calls - 1 + answer.draft_tokens), context)
    if draft is not None and record.cell.draft is not None:
        total += pass_flops(draft, float(prompt), prompt / 2) + pass_flops(draft, float(answer.draft_tokens), context)
    return total


def flops_per_token(records: Iterable[Record], shapes: Mapping[str, Shape | None]) -> float | None:
    """Operations a token by SPRINTER's counting (A.8); None where a model's sizes are not known."""
    spent, tokens = 0.0, 0
    for record in first(records):
        target = shapes.get(record.cell.target)
        draft = shapes.get(record.cell.draft) if record.cell.draft else None
        made = None if target is None else answer_flops(record, target, draft)
        if made is None:
            return None
        spent, tokens = spent + made, tokens + record.answer.tokens
    return spent / tokens if tokens else None


@dataclass(frozen=True)
class Regression:
    """T = draft * N_draft + target * N_target, fitted to answers (SpecDec++, arXiv 2405.19715, section 4.2).

    `r_squared` is 1 - the residuals' sum of squares over that of T around its mean.
    """

    draft: float
    target: float
    r_squared: float
    count: int


def regress(records: Iterable[Record]) -> Regression | None:
    """The cost model fitted to all answers; None if the counts do not determine both coefficients."""
    return fit_times(
        [(float(r.answer.draft_tokens), float(r.answer.target_calls), r.answer.seconds["total"]) for r in records]
    )


def fit_times(rows: Sequence[tuple[float, float, float]]) -> Regression | None:
    """The cost model fitted to rows of (drafted tokens, target calls, seconds); see `regress`."""
    if len(rows) < 3:
        return None
    table = torch.tensor(rows, dtype=torch.float64)
    counts, seconds = table[:, :2], table[:, 2]
    if int(torch.linalg.matrix_rank(counts, rtol=1e-6)) < 2:
        return None
    fitted = torch.linalg.lstsq(counts, seconds.unsqueeze(-1)).solution.squeeze(-1)
    left = float(((seconds - counts @ fitted) ** 2).sum())
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r_squared = 1 - left / spread if spread > 0 else math.nan
    return Regression(float(fitted[0]), float(fitted[1]), r_squared, len(rows))
