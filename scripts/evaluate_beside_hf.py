"""lm-eval's tasks by its own hf model and by draftproof, on the same questions: equal answers and scores, and the time.

    python scripts/evaluate_beside_hf.py MODEL QUESTIONS.jsonl --limit 20

QUESTIONS has GSM8K's fields, question and answer. Two tasks are made of it: answers are generated, and the right number
is chosen among four by log-likelihood, as in ARC. Every turn of every task has other questions: draftproof keeps what
it read, and would know a second turn's. Needs the extras `eval` and `offload`: lm-eval's hf model imports accelerate.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import lm_eval
from lm_eval.tasks import TaskManager

import draftproof.integrations.lm_eval
from draftproof import models

GENERATE = """task: numbers_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:", "\\n\\n"], do_sample: false, max_gen_toks: {tokens}}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """task: numbers_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nThe answer is"
doc_to_target: label
doc_to_choice: choices
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def read_questions(file: Path) -> list[str]:
    """The lines of a file with GSM8K's fields.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a JSON object with a question and an answer.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        row = json.loads(line)
        if not isinstance(row, dict) or not all(isinstance(row.get(field), str) for field in ("question", "answer")):
            raise ValueError(f"line {number} is {line[:60]!r}: an object with texts `question` and `answer` is needed")
    return lines


def write_tasks(folder: Path, lines: list[str], tokens: int) -> None:
    """Two tasks, and their questions."""
    rng, rows = random.Random(1), []
    for line in lines:
        row = json.loads(line)
        right = row["answer"].split("#### ")[-1].replace(",", "").strip()
        if not right.lstrip("-").isdecimal():
            continue
        others = [str(int(right) + step) for step in rng.sample([-10, -5, -2, -1, 1, 2, 5, 10], 3)]
        choices = rng.sample([right, *others], 4)
        rows.append({**row, "choices": choices, "label": choices.index(right)})
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        (folder / f"{name}.yaml").write_text(text.format(data=data, tokens=tokens), encoding="utf-8")


def evaluate(lm: Any, task: str, folder: Path) -> tuple[float, list[Any]]:
    """Seconds that the model takes, without lm-eval's own preparations, and what it answered to each question."""
    seconds = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            made = method(*args, **kwargs)
            seconds += time.perf_counter() - start
            return made

        return run

    for name in ("generate_until", "loglikelihood"):
        setattr(lm, name, timed(getattr(type(lm), name).__get__(lm)))
    with contextlib.redirect_stdout(sys.stderr):
        found = lm_eval.simple_evaluate(
            model=lm, tasks=[task], task_manager=TaskManager(include_path=str(folder)), bootstrap_iters=0
        )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return seconds, [sample["resps"] for sample in samples]


def main() -> None:
    """Evaluate with both, in turns, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("--limit", type=int, default=20, help="number of questions of a turn")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--drafter", default=None)
    given = parser.parse_args()
    if importlib.util.find_spec("accelerate") is None:
        parser.error("lm-eval's hf model needs accelerate: pip install 'draftproof[offload]'")
    needed = 2 * given.turns * given.limit
    if needed < 1:
        parser.error(f"{given.turns} turns of {given.limit} questions: both must be at least 1")
    try:
        lines = read_questions(given.questions)
    except (OSError, ValueError) as error:
        parser.error(f"{given.questions}: {error}")
    if len(lines) < needed:
        parser.error(f"{given.questions} has {len(lines)} questions; two tasks need {needed}")
    where = models.obtain(given.model)
    options = {} if given.drafter is None else {"drafter": given.drafter}
    ours = draftproof.integrations.lm_eval.DraftproofLM(
        given.model, dtype=given.dtype, batch_size=given.batch, **options
    )
    hf = lm_eval.api.registry.get_model("hf")(
        pretrained=where, dtype=given.dtype, batch_size=given.batch, device=str(ours.device)
    )
    turns = iter([lines[start : start + given.limit] for start in range(0, len(lines), given.limit)])
    for task in ("numbers_generate", "numbers_choose"):
        times: dict[str, list[float]] = {"hf": [], "draftproof": []}
        made: dict[str, list[Any]] = {"hf": [], "draftproof": []}
        for _ in range(given.turns):
            with tempfile.TemporaryDirectory() as name:
                write_tasks(Path(name), next(turns), given.tokens)
                for who, lm in (("hf", hf), ("draftproof", ours)):
                    seconds, answers = evaluate(lm, task, Path(name))
                    times[who].append(seconds)
                    made[who] += answers
        report(task, times, made)


def report(task: str, times: dict[str, list[float]], made: dict[str, list[Any]]) -> None:
    """One line for a task."""
    whole = {who: sum(each) for who, each in times.items()}
    ratios = " ".join(f"{one / other:.2f}" for one, other in zip(*times.values(), strict=True))
    pairs = list(zip(made["hf"], made["draftproof"], strict=True))
    if task.endswith("generate"):
        same = f"{sum(first == second for first, second in pairs)} of {len(pairs)} answers are equal"
    else:
        gaps = [
            abs(one[0][0] - other[0][0]) for first, second in pairs for one, other in zip(first, second, strict=True)
        ]
        flags = all(
            one[0][1] == other[0][1] for first, second in pairs for one, other in zip(first, second, strict=True)
        )
        same = f"{len(gaps)} log-likelihoods differ by at most {max(gaps):.1e}, is_greedy equal: {flags}"
    ratio = whole["hf"] / whole["draftproof"]
    print(
        f"{task}: {same}; hf {whole['hf']:.1f} s, draftproof {whole['draftproof']:.1f} s, ratio {ratio:.2f} "
        f"(turns: {ratios})"
    )


if __name__ == "__main__":
    main()
