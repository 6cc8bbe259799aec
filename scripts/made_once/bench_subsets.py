"""Make the question sets of the benchmark from their original files.

    python scripts/made_once/bench_subsets.py DATA src/draftproof/bench/data

DATA has mt-bench/question.jsonl, vicuna-bench/question.jsonl, gsm8k/test.jsonl, humaneval/HumanEval.jsonl.gz,
self-instruct/user_oriented_instructions.jsonl, corpus-pd-fiction/test.txt.xz (works separated by <|endoftext|>, one
paragraph on each line) and corpus-tinystories-sample/tiny_stories.txt, at the commits that the NOTICE of each set
names. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftproof.bench.questions import OPENING
from draftproof.files import whole_file
from draftproof.training.data import documents, read_text, stories

COUNT = 16
LONG = 60  # least number of words of a text that is long enough to be continued
PASSAGE = 700  # least number of words of a passage that is to be summarised
PASSAGES = 8


def rows(file: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in read_text(file)[1].split("\n") if line.strip()]


def in_turns(groups: Iterable[list[Any]]) -> list[Any]:
    """The first member of each group, then the second of each, and so on, so that all groups come early."""
    return [one for tier in itertools.zip_longest(*groups) for one in tier if one is not None]


def by_category(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Questions in an order in which the categories alternate."""
    kinds = dict.fromkeys(row["category"] for row in found)
    return in_turns([row for row in found if row["category"] == kind] for kind in kinds)


def spread(found: list[Any]) -> list[Any]:
    """COUNT members of a list, at equal distances."""
    return found[:: max(len(found) // COUNT, 1)]


def only(found: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The objects with these keys only."""
    return [{key: row[key] for key in keys} for row in found]


def opening(text: str) -> str:
    """The first words of a text."""
    return " ".join(text.split()[:OPENING])


def fiction(text: str) -> list[dict[str, Any]]:
    """Openings of long paragraphs, in an order in which the works alternate."""
    works = []
    for work in documents(text):
        long = [part for part in work.split("\n") if len(part.split()) >= LONG]
        works.append(long[10 :: max(len(long) // COUNT, 1)])  # without prefaces
    return [{"id": f"fiction-{n}", "text": opening(part)} for n, part in enumerate(in_turns(works), 1)]


def passage(paragraphs: list[str]) -> str:
    """The first paragraphs, at least PASSAGE words together."""
    words = itertools.accumulate(len(part.split()) for part in paragraphs)
    before = sum(1 for count in words if count < PASSAGE)
    return "\n\n".join(paragraphs[: before + 1])


def summaries(text: str) -> list[dict[str, Any]]:
    """Requests for the summary of a passage, in an order in which the works alternate."""
    works = []
    for work in documents(text):
        parts = [part for part in work.split("\n") if part.strip()]
        each = PASSAGES // 2
        works.append([passage(parts[len(parts) * place // (each + 1) :]) for place in range(1, each + 1)])
    return [
        {"id": f"summaries-{n}", "prompt": f"Summarise this passage in a few sentences.\n\n{text}"}
        for n, text in enumerate(in_turns(works)[:PASSAGES], 1)
    ]


def main() -> None:
    """Write every set."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    data: Path = args.data
    tales = [
        part
        for part in stories(read_text(data / "corpus-tinystories-sample/tiny_stories.txt")[1])
        if len(part.split()) >= LONG
    ]
    made = {
        "mt-bench": by_category(rows(data / "mt-bench/question.jsonl")),
        "vicuna-bench": by_category(rows(data / "vicuna-bench/question.jsonl")),
        "gsm8k": spread(rows(data / "gsm8k/test.jsonl")),
        "humaneval": only(spread(rows(data / "humaneval/HumanEval.jsonl.gz")), "task_id", "prompt"),
        "self-instruct": spread(rows(data / "self-instruct/user_oriented_instructions.jsonl")),
        "fiction": fiction(read_text(data / "corpus-pd-fiction/test.txt.xz")[1]),
        "summaries": summaries(read_text(data / "corpus-pd-fiction/test.txt.xz")[1]),
        "tinystories": [
            {"id": f"tinystories-{n}", "text": opening(text)} for n, text in enumerate(spread(tales[1:]), 1)
        ],
    }
    for name, found in made.items():
        with whole_file(args.out / f"{name}.jsonl") as work:
            work.write_text("".join(json.dumps(row) + "\n" for row in found[:COUNT]), encoding="utf-8")


if __name__ == "__main__":
    main()
