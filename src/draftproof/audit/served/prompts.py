"""Prompts of an audit: short openings of several kinds, or a user's own from a file."""

from __future__ import annotations

import json
from pathlib import Path

from draftproof.errors import UserError, reason

PROMPTS = (
    "Once upon a time there was a little girl who lived with her mother in a small house near the woods. One day",
    "The recipe is simple. First you need two eggs, a cup of milk, some flour and a little salt. Then you",
    "Tom had a big red ball. He played with the ball every day in the park with his friend Sam. Then the ball",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return",
    "The town lies at the mouth of the river. In winter the ships stay in the harbour, and in spring the people",
    "Question: What is the capital of France?\nAnswer: Paris.\nQuestion: What is the capital of Italy?\nAnswer:",
    "The old man looked at the sea for a long time. He was happy, and he was sad, and he said to the boy:",
    "Dear Anna, thank you for your letter. We are all well here, and the garden is full of flowers. I hope",
)


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file: a text a line, or in a .jsonl file objects with a field "prompt"; our own without a file.

    Raises:
        UserError: a file that cannot be read, or has no prompt.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            lines = [str(json.loads(line)["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise UserError(f"cannot read prompts from {path}: {reason(cause)}") from cause
    if not lines:
        raise UserError(f"{path} has no prompts: give a text on each line")
    return lines
