"""The audit of a server against a second one without speculation: two-sample tests by betting, without any weights.

Both answer the same prompts. If both have the same distribution, the two answers of a pair can be swapped, so a bet on
the difference of any feature of theirs, chosen before the pair is seen, has the factor 1 + b (g(first) - g(second))
with mean 1. This needs far more answers than the target's weights do, and can exclude nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftproof.audit.server.checks import Check, checks_for, chosen, violations
from draftproof.audit.server.client import Client, Refused, Reply
from draftproof.audit.server.evidence import Wealth
from draftproof.audit.server.fault_models import looked_up
from draftproof.audit.server.run import FAIL, OPEN, REFUSED, CheckResult, ServerAuditOptions

_STAKES = (0.9, 0.5, 0.2, -0.2, -0.5, -0.9)
_RECENT = 8


def _share(tokens: Sequence[int], holds: Callable[[Sequence[int], int], bool]) -> float:
    """The share of tokens for which something holds of the tokens before them and themselves."""
    return sum(holds(tokens[:place], token) for place, token in enumerate(tokens)) / max(len(tokens), 1)


_FEATURES: dict[str, Callable[[Sequence[int], int], float]] = {
    "length": lambda tokens, most: min(len(tokens) / most, 1.0),
    "distinct tokens": lambda tokens, _: _share(tokens, lambda before, token: token not in before),
    "recent tokens repeated": lambda tokens, _: _share(tokens, lambda before, token: token in before[-_RECENT:]),
    "earlier passages repeated": lambda tokens, _: _share(tokens, lambda before, token: looked_up(before) == token),
}


class Learned:
    """A feature that is learned from the pairs so far: on which side an answer's pairs of tokens were more frequent."""

    def __init__(self) -> None:
        self._counts: tuple[Counter[Any], Counter[Any]] = (Counter(), Counter())

    def __call__(self, tokens: Sequence[int]) -> float:
        """Between 0 and 1; above 1/2 where the answer resembles the first server's."""
        first, second = self._counts
        score = 0.0
        for part in (tokens, list(pairwise(tokens))):
            score += sum(math.log((first[each] + 1) / (second[each] + 1)) for each in part)
        return 1 / (1 + math.exp(-max(min(score / math.sqrt(max(len(tokens), 1)), 30), -30)))

    def learn(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Add a pair that has been bet on."""
        for counts, tokens in zip(self._counts, (first, second), strict=True):
            counts.update(tokens)
            counts.update(pairwise(tokens))


class PairEvidence(Wealth):
    """The wealth of all bets on differences between two servers, whose means may differ by a slack."""

    def __init__(self, slack: float, most: int) -> None:
        self._slack = slack
        self._most = most
        self._learned = Learned()
        self._log = {(name, stake): 0.0 for name in (*_FEATURES, "learned") for stake in _STAKES}
        self.pairs = 0

    def add(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Add the answers of both servers to one prompt."""
        values = {name: make(first, self._most) - make(second, self._most) for name, make in _FEATURES.items()}
        values["learned"] = self._learned(first) - self._learned(second)
        for (name, stake), before in self._log.items():
            factor = math.log1p(stake * values[name]) - math.log1p(abs(stake) * self._slack)
            self._log[name, stake] = before + factor
        self._learned.learn(first, second)
        self.pairs += 1
        top = max(self._log.values())
        mean = top + math.log(sum(math.exp(each - top) for each in self._log.values()) / len(self._log))
        self._peak = max(self._peak, mean)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        best = {name: max(self._log[name, stake] for stake in _STAKES) for name in (*_FEATURES, "learned")}
        return {
            "pairs": self.pairs,
            "e_value": self.e_value,
            "p_value": self.p_value,
            "features": {name: math.exp(min(log, 700.0)) for name, log in best.items()},
        }


async def audit_pair(
    server: Client,
    reference: Client,
    options: ServerAuditOptions,
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    *,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[dict[str, Any], list[CheckResult]]:
    """All checks on a server that speculates, and on one without speculation of the same model.

    `budget` counts tokens of one server; `numerics` is the slack if it is a number, else 0.01. `encode` gives a text's
    tokens, for servers that return none. Returns what the server says of itself, and the findings.
    """
    prompts = [encode(text) for text in texts]
    try:
        facts = await server.start(prompts[0], texts[0])
        await reference.start(prompts[0], texts[0])
        for each in (server, reference):  # without weights there is no tokenizer: prompts are texts
            each.prompts_as_ids = False
        names = [name for name in chosen(options.checks) if name not in ("greedy", "logit_bias", "min_tokens")]
        pair = _Pair((server, reference), options, texts, encode, options.alpha / max(len(names), 1), progress)
        checks = checks_for((0, 1, 2))
        return facts, [await pair.finding(checks[name]) for name in names]
    finally:
        await server.close()
        await reference.close()


@dataclass(frozen=True)
class _Pair:
    servers: tuple[Client, Client]
    options: ServerAuditOptions
    texts: Sequence[str]
    encode: Callable[[str], list[int]]
    alpha: float
    progress: Callable[[str, int, int], None]

    async def finding(self, check: Check) -> CheckResult:
        found, given = CheckResult(check), self.options.numerics
        evidence = PairEvidence(float(given) if isinstance(given, int | float) else 0.01, self.options.max_tokens)
        try:
            await self._compare(found, evidence)
        except Refused as error:
            found.verdict = REFUSED
            found.why = f"a server refuses it: {error}"
            return found
        found.evidence = evidence.to_dict() | {"alpha": self.alpha}
        found.verdict = FAIL
        if found.broken:
            found.why = found.broken[0]
        elif evidence.p_value <= self.alpha:
            likely = max(found.evidence["features"].items(), key=lambda item: float(item[1]))[0]
            found.why = f"the two servers answer differently (p = {evidence.p_value:.1e}), most in: {likely}"
        else:
            found.verdict = OPEN
            found.why = f"no difference found in {evidence.pairs} pairs of answers"
        return found

    async def _compare(self, found: CheckResult, evidence: PairEvidence) -> None:
        number, check, most = 0, found.check, self.options.budget
        while found.tokens < most and evidence.p_value > self.alpha and not found.broken:
            batch = range(number, number + self.options.parallel)
            replies = await asyncio.gather(*(self._asked(check, each, which) for each in batch for which in (0, 1)))
            for each, left, right in zip(batch, replies[::2], replies[1::2], strict=True):
                own = self._tokens(left)
                evidence.add(own, self._tokens(right))
                found.answers += 1
                found.tokens += max(len(own), 1)
                if check.form or check.fields.get("stop"):
                    finish = left.finish if left.finish == "stop" else None
                    shown: dict[str, Any] = {"text": left.text, "tokens": own, "finish": finish, "decoded": left.text}
                    broken = violations(check, **shown, max_tokens=self.options.max_tokens, ends=())
                    found.broken += [f"answer {each}: {what}" for what in broken]
            number = batch.stop
            self.progress(check.name, min(found.tokens, most), most)

    def _asked(self, check: Check, number: int, which: int) -> Coroutine[Any, Any, Reply]:
        fields = check.request(self.options.max_tokens)
        if check.seeded or self.options.seeds:
            fields["seed"] = 2 * (self.options.seed * 1_000_000 + number) + which
        return self.servers[which].complete((), self.texts[number % len(self.texts)], fields)

    def _tokens(self, reply: Reply) -> list[int]:
        return list(reply.tokens) if reply.tokens is not None else self.encode(reply.text)


def words(text: str) -> list[int]:
    """The words of a text as numbers, where there is no tokenizer."""
    return [hash(word) & 0x7FFFFFFF for word in text.split()] or [0]
