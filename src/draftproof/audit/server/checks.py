"""Checks of a server: prompts, the sampling parameters that each asks for, and what must hold for every answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftproof.errors import refuse_unknown
from draftproof.sampling import SamplingParams

LONGEST_MINIMUM = 24  # tokens that the check min_tokens asks for
PROMPTS = (  # where the user has none: short openings of several kinds
    "Once upon a time there was a little girl who lived with her mother in a small house near the woods. One day",
    "The recipe is simple. First you need two eggs, a cup of milk, some flour and a little salt. Then you",
    "Tom had a big red ball. He played with the ball every day in the park with his friend Sam. Then the ball",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return",
    "The town lies at the mouth of the river. In winter the ships stay in the harbour, and in spring the people",
    "Question: What is the capital of France?\nAnswer: Paris.\nQuestion: What is the capital of Italy?\nAnswer:",
    "The old man looked at the sea for a long time. He was happy, and he was sad, and he said to the boy:",
    "Dear Anna, thank you for your letter. We are all well here, and the garden is full of flowers. I hope",
)
GRAMMAR = "[a-z]+( [a-z]+){3,8}"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no", "maybe"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Check:
    """One kind of requests, and what it looks for."""

    name: str
    about: str
    # Of the request, besides the prompt and what all requests have.
    fields: Mapping[str, Any] = field(default_factory=dict)
    seeded: bool = False  # whether each request has a seed of its own
    form: str = ""  # name of the form that a finished answer must have: "regex", "schema" or ""

    def request(self, max_tokens: int) -> dict[str, Any]:
        """The fields of a request, besides its prompt."""
        return {"temperature": 1.0, "max_tokens": max_tokens, **self.fields}

    def params(self, max_tokens: int) -> SamplingParams:
        """What the request means, as SamplingParams; the form of the answer is not part of it."""
        fields = self.request(max_tokens)
        for form in ("structured_outputs", "response_format"):
            fields.pop(form, None)
        if "logit_bias" in fields:
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        return SamplingParams(**fields)


def checks_for(frequent: Sequence[int]) -> dict[str, Check]:
    """All checks.

    `frequent`: three or more tokens that answers often hold, most frequent first. Biases are put on them, and
    min_tokens is checked with one of them as stop token.
    """
    first, second, third = frequent[:3]
    bias = {str(first): -100.0, str(second): 2.0, str(third): -2.0}
    made = [
        Check("plain", "temperature 1"),
        Check("seeded", "temperature 1, a seed in each request", seeded=True),
        Check("temperature", "temperature 0.7", {"temperature": 0.7}),
        Check("greedy", "temperature 0: the most likely token each time", {"temperature": 0.0}),
        Check("top_p", "top_p 0.8", {"top_p": 0.8}),
        Check("top_k", "top_k 10", {"top_k": 10}),
        Check("min_p", "min_p 0.05", {"min_p": 0.05}),
        Check("presence", "presence_penalty 2", {"presence_penalty": 2.0}),
        Check("frequency", "frequency_penalty 2", {"frequency_penalty": 2.0}),
        Check("repetition", "repetition_penalty 1.5", {"repetition_penalty": 1.5}),
        Check("logit_bias", "logit_bias on three frequent tokens, one of them -100", {"logit_bias": bias}),
        Check(
            "min_tokens",
            f"min_tokens {LONGEST_MINIMUM} with a frequent stop token",
            {"min_tokens": LONGEST_MINIMUM, "stop_token_ids": [first]},
        ),
        Check("stop", "stop strings", {"stop": [" the", "."]}),
        Check("regex", "structured_outputs with a regex", {"structured_outputs": {"regex": GRAMMAR}}, form="regex"),
        Check(
            "json_schema",
            "response_format with a JSON schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}},
            form="schema",
        ),
    ]
    return {check.name: check for check in made}


NAMES = tuple(checks_for((0, 1, 2)))


def chosen(names: Sequence[str]) -> list[str]:
    """The names of the checks that were asked for; all without a name."""
    for name in names:
        refuse_unknown("check", name, NAMES)
    return list(dict.fromkeys(names)) or list(NAMES)


def violations(
    check: Check,
    *,
    text: str,
    tokens: Sequence[int],
    finish: str | None,
    max_tokens: int,
    ends: Sequence[int],
    decoded: str,
) -> list[str]:
    """What one answer breaks, whatever was drawn; empty for a right server.

    `tokens` are those that were sampled, with the end token where one ended the answer, and `decoded` is their text.
    """
    params = check.params(max_tokens)
    found = []
    if len(tokens) > max_tokens:
        found.append(f"{len(tokens)} tokens, and max_tokens is {max_tokens}")
    if finish == "length" and len(tokens) < max_tokens:
        found.append(f'finish_reason is "length" after {len(tokens)} of {max_tokens} tokens')
    stops = {*ends, *params.stop_token_ids}
    early = [place for place, token in enumerate(tokens[: params.min_tokens]) if token in stops]
    if early and params.min_tokens:
        found.append(f"an end or stop token at place {early[0]}, before min_tokens {params.min_tokens}")
    after = [place for place, token in enumerate(tokens[:-1]) if token in stops]
    if after and not early:
        found.append(f"text goes on after the end or stop token at place {after[0]}")
    for stop in params.stop:
        if stop in text:
            found.append(f"the text holds the stop string {stop!r}")
        elif stop in decoded and finish != "stop":
            found.append(f"the stop string {stop!r} was written and did not end the answer")
    if check.form and finish == "stop":
        found += _mismatches(check.form, text)
    return found


def _mismatches(form: str, text: str) -> list[str]:
    if form == "regex":
        return [] if re.fullmatch(GRAMMAR, text) else [f"the text {text[:60]!r} does not match the regex"]
    try:
        value = json.loads(text)
    except ValueError:
        return [f"the text {text[:60]!r} is not JSON"]
    fits = (
        isinstance(value, dict)
        and value.keys() == {"answer", "sure"}
        and value["answer"] in ("yes", "no", "maybe")
        and isinstance(value["sure"], bool)
    )
    return [] if fits else [f"the JSON {text[:60]!r} does not fit the schema"]
