"""Quality of the answers of lossy rules: likelihood under the target, ROUGE against plain answers, a user's own judge.

Lossless methods are shown beside the lossy ones: their quality is that of another sample from the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from draftproof.bench.cell import Cell
from draftproof.bench.estimate import Estimate, bootstrap
from draftproof.bench.measures import first, paired, question_and_seed
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.questions import Question
from draftproof.bench.record import Record
from draftproof.files import write_json
from draftproof.progress import Watch, silent
from draftproof.sampling import SamplingParams
from draftproof.training.features import ModelPair
from draftproof.training.metrics import rouge_scores
from draftproof.training.responses import Response

FILE = "likelihoods.json"
Scores = Mapping[str, float]  # log-probability per token by `name_of`
Judge = Callable[[str, str, str], float]  # prompt, two answers -> 1: the first is better, 0: the second, 0.5: a tie


def name_of(record: Record) -> str:
    """A record's name in the file of scores."""
    return f"{record.cell.key}/{record.question}"


def score(
    records: Iterable[Record],
    questions: Mapping[str, Sequence[Question]],
    out: Path,
    cache: ModelCache,
    *,
    watch: Watch = silent,
) -> None:
    """Keep the likelihood of all answers in settings with a lossy method in the run's folder; each is made once."""
    own = first(records)
    lossy = {record.cell.group for record in own if not record.cell.lossless}
    known = dict(read_scores(out))
    left = [record for record in own if record.cell.group in lossy and name_of(record) not in known]
    if not left:
        return
    by_id = {(name, question.id): question for name, many in questions.items() for question in many}
    with watch("scoring answers", len(left), 0) as tick:
        for number, record in enumerate(left, 1):
            question = by_id[record.cell.dataset, record.question]
            known[name_of(record)] = log_likelihood(cache, record.cell, question, record.answer.token_ids)
            tick(number, tokens=record.answer.tokens)
    write_json(out / FILE, known)


def read_scores(out: Path) -> Scores:
    """The scores written by `score`; empty before that."""
    file = out / FILE
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def log_likelihood(cache: ModelCache, cell: Cell, question: Question, tokens: Sequence[int]) -> float:
    """Mean log-probability of an answer's tokens under the target at temperature 1, without top-k or top-p."""
    target = cache.plain_engine(cell).target
    response = Response(tuple(cache.encode(cell, question)), tuple(tokens))
    (total,) = ModelPair(target, target, SamplingParams()).log_likelihoods([response])
    return total / len(response.tokens)


def likelihood(records: Iterable[Record], scores: Scores) -> Estimate | None:
    """Log-probability per token, the mean over answers; None if they were not scored."""
    found: dict[str, list[float]] = {}
    for record in first(records):
        if name_of(record) not in scores:
            return None
        found.setdefault(question_and_seed(record)[0], []).append(scores[name_of(record)])
    return bootstrap([fmean(each) for each in found.values()], fmean)


def rouge(own: Iterable[Record], base: Iterable[Record]) -> Estimate | None:
    """ROUGE-L against another cell's answers, the mean over questions; None without package or common question."""
    found = []
    for pairs in paired(first(own), first(base)).values():
        texts = [side.answer.text for pair in pairs for side in pair]
        scores = rouge_scores(texts[1::2], texts[0::2])
        if scores is None:
            return None
        found.append(fmean([each["rougeL"] for each in scores]))
    return bootstrap(found, fmean) if found else None


def win_rate(
    own: Iterable[Record], base: Iterable[Record], judge: Judge, prompts: Mapping[tuple[str, str], str]
) -> Estimate:
    """How often a judge prefers these answers to another cell's; ties count half; pairs are judged in both orders.

    Args:
        own: records of the cell judged.
        base: records of the cell it is judged against.
        judge: the user's own callable: a model, a service, a rule.
        prompts: texts by data set and question.

    Raises:
        ValueError: a verdict outside 0 to 1.
    """
    found = []
    for pairs in paired(first(own), first(base)).values():
        for mine, theirs in pairs:
            prompt = prompts[mine.cell.dataset, mine.question]
            here, there = mine.answer.text, theirs.answer.text
            verdicts = (judge(prompt, here, there), 1 - judge(prompt, there, here))
            if not all(0 <= verdict <= 1 for verdict in verdicts):
                raise ValueError(f"judge: expected 0 to 1, 1 for the first answer, got {verdicts}")
            found.append(sum(verdicts) / 2)
    return bootstrap(found, fmean)
