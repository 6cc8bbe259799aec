"""Prompts of an audit, where the user has none: short openings of several kinds."""

from __future__ import annotations

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
