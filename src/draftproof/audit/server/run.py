"""The audit of a server against the target's weights: check by check, until a fault is found or excluded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftproof.audit.server.checks import LONGEST_MINIMUM, Check, checks_for, chosen, violations
from draftproof.audit.server.client import Client, Refused, Reply
from draftproof.audit.server.evidence import SHARES, Evidence, needed_tokens
from draftproof.audit.server.fault_models import FLOOR, ScoredAnswer, kinds_of, ratios, reference
from draftproof.audit.server.records import Records
from draftproof.audit.server.scoring import Reference, drifts, gaps, largest_change
from draftproof.errors import UserError
from draftproof.sampling import SamplingParams

OK, FAIL, OPEN, REFUSED = "ok", "FAIL", "open", "refused"
NUMERICS = ("float32", "bfloat16", "float16")
_LEAST_SLACK = 1e-4
_LEAST_TIE = 1e-3  # of logits, in float32
_MARGIN = 2.0  # how much larger than the measured difference a server's own may be
_EXAMPLES = 3


@dataclass(frozen=True)
class ServerAuditOptions:
    """What an audit does.

    Attributes:
        checks: only this check; without it all.
        alpha: false-alarm rate: the probability that a right server fails in any check of the audit, at most.
        beta: error rate of each statement that a fault is excluded.
        share: a check passes when every kind of fault in at least this share of the tokens is excluded; from 0.02 on.
        max_tokens: most tokens of an answer.
        budget: most sampled tokens of each check.
        parallel: requests at a time.
        seed: seed of the requests' seeds.
        seeds: send a seed with every request, not only in the check "seeded".
        numerics: the server's arithmetic: float32, bfloat16, float16, or the slack itself as a number.
    """

    checks: tuple[str, ...] = ()
    alpha: float = 0.01
    beta: float = 0.05
    share: float = 0.1
    max_tokens: int = 64
    budget: int = 4000
    parallel: int = 8
    seed: int = 0
    seeds: bool = False
    numerics: str | float = "bfloat16"

    def __post_init__(self) -> None:
        chosen(self.checks)
        for name in ("alpha", "beta", "share"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"{name}: expected a number between 0 and 1, got {getattr(self, name)}")
        if self.share < min(SHARES):
            raise UserError(f"share: expected {min(SHARES)} or more, got {self.share}")
        for name, least in (("max_tokens", LONGEST_MINIMUM), ("budget", 1), ("parallel", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name}: expected {least} or more, got {getattr(self, name)}")
        if isinstance(self.numerics, str) and self.numerics not in NUMERICS:
            named = ", ".join(NUMERICS)
            raise UserError(f"numerics: expected one of {named}, or a number (the slack), got {self.numerics!r}")


@dataclass
class CheckResult:
    """The result of one check."""

    check: Check
    # "ok": no fault, and faults of the stated size are excluded, all kinds that the budget is enough for; "FAIL";
    # "open": no fault, and some of these kinds are not excluded yet; "refused": by the server.
    verdict: str = OPEN
    why: str = ""  # of the verdict, in a sentence
    answers: int = 0  # that were scored
    tokens: int = 0  # of them
    left_out: int = 0  # answers whose tokens could not be known
    evidence: dict[str, Any] = field(default_factory=dict)  # of the sequential test; empty for checks of the form only
    slack: dict[str, float] = field(default_factory=dict)  # of each kind
    # For each kind, about how many tokens it takes to find it in the stated share; None for never.
    needed: dict[str, float | None] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # what single answers break, with the number of the answer
    examples: list[dict[str, Any]] = field(default_factory=list)  # requests to reproduce

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        made = {key: value for key, value in vars(self).items() if key != "check"}
        fields = dict(self.check.fields)
        return {"kind": "check", "check": self.check.name, "about": self.check.about, "fields": fields, **made}


class ServerAudit:
    """One audit.

    `rounded` are the same weights in the server's arithmetic, where that is not float32; answers are kept in `folder`,
    so that the audit can go on later; `progress` is called with the check, the tokens so far and the budget.
    """

    def __init__(
        self,
        client: Client,
        right: Reference,
        options: ServerAuditOptions,
        prompts: Sequence[str],
        *,
        rounded: Reference | None = None,
        folder: Path | None = None,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self._client = client
        self._right = right
        self._rounded = rounded
        self._options = options
        self._texts = list(prompts)
        self._prompts = [right.encode(text) for text in prompts]
        self._progress = progress
        self._refuse_long()
        self.checks = checks_for(self._frequent())
        self._names = chosen(options.checks)
        sent = {name: getattr(options, name) for name in ("max_tokens", "seed", "seeds")}
        fields = {name: dict(check.fields) for name, check in self.checks.items()}
        self.records = Records(folder, {**sent, "prompts": self._texts, "url": client.url, "fields": fields})
        self.server: dict[str, Any] = {}

    def _refuse_long(self) -> None:
        most = self._right.target.max_positions
        longest = max(map(len, self._prompts))
        if not min(map(len, self._prompts)):
            raise UserError("a prompt is empty: give prompts of at least one token")
        if most is not None and longest + self._options.max_tokens > most:
            raise UserError(
                f"a prompt of {longest} tokens and max_tokens {self._options.max_tokens} do not fit the target's "
                f"context of {most}: shorten prompts or answers"
            )

    def _frequent(self) -> list[int]:
        """Tokens that are likely in many contexts of the prompts, and do not end a text."""
        total = torch.stack([answer.rows().mean(0) for answer in self._contexts(SamplingParams())]).mean(0)
        return [int(token) for token in total.topk(8).indices if int(token) not in self._right.ends][:3]

    def _contexts(self, params: SamplingParams, *, rounded: bool = False) -> list[ScoredAnswer]:
        """The prompts' own tokens as if they had been sampled; used to measure, not to test."""
        model = self._rounded if rounded and self._rounded is not None else self._right
        starts = [max(1, len(prompt) // 3) for prompt in self._prompts]
        pairs = [
            (prompt[:start], prompt[start:] or prompt[:1]) for start, prompt in zip(starts, self._prompts, strict=True)
        ]
        return model.read(params, [left for left, _ in pairs], [rest for _, rest in pairs])

    async def run(self) -> list[CheckResult]:
        """All checks, one after another; a UserError where the server cannot be asked."""
        try:
            self.server = await self._client.start(self._prompts[0], self._texts[0])
            tested = [name for name in self._names if self._tested(self.checks[name])]
            alpha = self._options.alpha / max(len(tested), 1)
            return [await self._check(self.checks[name], alpha) for name in self._names]
        finally:
            self.records.close()
            await self._client.close()

    def _tested(self, check: Check) -> bool:
        """Whether a check has a test; the form of answers and greedy tokens are looked at one by one."""
        return not check.form and check.fields.get("temperature") != 0

    async def _check(self, check: Check, alpha: float) -> CheckResult:
        finding = CheckResult(check)
        params = check.params(self._options.max_tokens)
        kinds = kinds_of(params, drafted=self._right.draft is not None) if self._tested(check) else {}
        tie = self._measure(finding, params, alpha, kinds)
        evidence = Evidence(tuple(kinds), finding.slack, floor=FLOOR)
        number = 0
        while finding.tokens < self._options.budget and not self._decided(finding, evidence, alpha):
            batch = range(number, number + self._options.parallel)
            replies = await self._ask(check, batch)
            refused = next((reply for reply in replies if isinstance(reply, str)), None)
            if refused is not None:
                finding.verdict = REFUSED
                finding.why = f"the server refuses it: {refused}"
                return finding
            self._take(finding, params, batch, [r for r in replies if isinstance(r, Reply)], evidence, kinds, tie)
            number = batch.stop
            self._progress(check.name, min(finding.tokens, self._options.budget), self._options.budget)
            if not finding.tokens and finding.left_out >= 4 * self._options.parallel:
                break
        self._conclude(finding, evidence, alpha)
        return finding

    def _measure(self, finding: CheckResult, params: SamplingParams, alpha: float, kinds: Mapping[str, Any]) -> float:
        """Fill in the slack of each kind and its detectable size; returns the tolerance of greedy tokens."""
        options = self._options
        exact = self._contexts(params)
        rounded = self._contexts(params, rounded=True) if self._rounded is not None else exact
        if isinstance(options.numerics, float | int):
            finding.slack = dict.fromkeys(kinds, float(options.numerics))
        else:
            found = drifts(exact, rounded, kinds)
            finding.slack = {name: _MARGIN * drift + _LEAST_SLACK for name, drift in found.items()}
        rows = [reference(answer) for answer in exact]
        p, mixed = torch.cat([row for row, _ in rows]), torch.cat([row for _, row in rows])
        for name, make in kinds.items():
            other = torch.cat([make(answer, own) for answer, (own, _) in zip(exact, rows, strict=True)])
            tokens = needed_tokens(
                p,
                (1 - FLOOR) * other / mixed.clamp(min=1e-30),
                other,
                share=min(SHARES, key=lambda share: abs(share - options.share)),
                slack=finding.slack[name],
                alpha=alpha,
                bets=len(kinds) * len(SHARES),
            )
            finding.needed[name] = None if tokens > 1e9 else round(tokens)
        return _LEAST_TIE + _MARGIN * largest_change(exact, rounded)

    async def _ask(self, check: Check, batch: Sequence[int]) -> list[Reply | str]:
        """Answers of the server, those that are kept and new ones; a text is a refusal."""
        kept = [self.records.get(check.name, number) for number in batch]
        missing = [number for number, reply in zip(batch, kept, strict=True) if reply is None]
        made = dict(zip(missing, await asyncio.gather(*[self._one(check, number) for number in missing]), strict=True))
        for number in missing:
            self.records.add(check.name, number, self._request(check, number), made[number])
        return [made[number] if reply is None else reply for number, reply in zip(batch, kept, strict=True)]

    async def _one(self, check: Check, number: int) -> Reply | str:
        try:
            return await self._client.complete(*self._asked(check, number))
        except Refused as error:
            return str(error)

    def _asked(self, check: Check, number: int) -> tuple[list[int], str, dict[str, Any]]:
        """A prompt as token ids and as text, and the fields of a request."""
        fields = check.request(self._options.max_tokens)
        if check.seeded or self._options.seeds:
            place = list(self.checks).index(check.name)
            fields["seed"] = (self._options.seed * len(self.checks) + place) * 1_000_000 + number
        which = number % len(self._prompts)
        return self._prompts[which], self._texts[which], fields

    def _request(self, check: Check, number: int) -> dict[str, Any]:
        return self._client.body(*self._asked(check, number))

    def _take(
        self,
        finding: CheckResult,
        params: SamplingParams,
        numbers: Sequence[int],
        replies: Sequence[Reply],
        evidence: Evidence,
        kinds: Mapping[str, Any],
        tie: float,
    ) -> None:
        known = [(number, reply, self._sampled(reply)) for number, reply in zip(numbers, replies, strict=True)]
        finding.left_out += sum(tokens is None for _, _, tokens in known)
        whole = [(number, reply, tokens) for number, reply, tokens in known if tokens]
        finding.answers += len(whole)
        finding.tokens += sum(len(tokens) for _, _, tokens in whole)
        self._check_rules(finding, whole)
        if not whole or not (kinds or params.temperature == 0):
            return
        prompts = [self._prompts[number % len(self._prompts)] for number, _, _ in whole]
        answers = self._right.read(params, prompts, [tokens for _, _, tokens in whole])
        for (number, _, _), answer in zip(whole, answers, strict=True):
            if kinds:
                evidence.add(ratios(answer, dict(kinds)))
            else:
                wrong = [gap for gap in gaps(answer) if gap.behind > tie]
                self._note(
                    finding,
                    number,
                    [
                        f"token {gap.place} is {gap.token}, whose logit is {gap.behind:.3g} below that of {gap.best} "
                        f"(rounding explains {tie:.2g})"
                        for gap in wrong
                    ],
                )

    def _check_rules(self, finding: CheckResult, answers: Iterable[tuple[int, Reply, Sequence[int]]]) -> None:
        """Note what breaks a rule that holds whatever was drawn: lengths, ends, stop strings, the text of tokens."""
        for number, reply, tokens in answers:
            broken = violations(
                finding.check,
                text=reply.text,
                tokens=tokens,
                finish=reply.finish,
                max_tokens=self._options.max_tokens,
                ends=self._right.ends,
                decoded=self._right.decode(tokens),
            )
            self._note(finding, number, broken)

    def _note(self, finding: CheckResult, number: int, broken: Sequence[str]) -> None:
        if broken and len(finding.examples) < _EXAMPLES:
            finding.examples.append(self._request(finding.check, number))
        finding.broken += [f"answer {number}: {what}" for what in broken]

    def _sampled(self, reply: Reply) -> tuple[int, ...] | None:
        """The sampled tokens, with the token that ended the answer; None where the server does not return them.

        The text encoded again is no substitute: a right server often samples tokens that the tokenizer would not write
        the text with, and such an audit would accuse it (docs/log/server.md).
        """
        if reply.tokens is None:
            return None
        ended = reply.finish == "stop" and reply.stop_reason is None
        one = self._right.ends if len(self._right.ends) == 1 else ()
        return reply.tokens if not ended or not one or reply.tokens[-1:] == one else (*reply.tokens, *one)

    def _decided(self, finding: CheckResult, evidence: Evidence, alpha: float) -> bool:
        if finding.broken:
            return True
        if not evidence.kinds or not evidence.tokens:
            return False
        if evidence.found(alpha):
            return True
        suspected = evidence.log_e_value > 0  # the bets are ahead: a kind judged too subtle may show with more tokens
        return not suspected and not self._left(evidence, self._detectable(finding))

    def _detectable(self, finding: CheckResult) -> list[str]:
        """The kinds of faults that the budget is enough for, in the stated share."""
        return [
            kind for kind, tokens in finding.needed.items() if tokens is not None and tokens <= self._options.budget
        ]

    def _left(self, evidence: Evidence, kinds: Sequence[str]) -> list[str]:
        """Those of the kinds that are not excluded in the stated share yet."""
        known = {one.kind: one.share for one in evidence.known(self._options.beta)}
        return [kind for kind in kinds if (known[kind] or 1.0) > self._options.share]

    def _conclude(self, finding: CheckResult, evidence: Evidence, alpha: float) -> None:
        options = self._options
        if evidence.kinds:
            finding.evidence = evidence.to_dict(options.beta) | {"alpha": alpha}
        if finding.broken:
            finding.verdict = FAIL
            finding.why = finding.broken[0]
        elif evidence.found(alpha):
            likely = max(evidence.known(options.beta), key=lambda known: known.evidence)
            finding.verdict = FAIL
            finding.why = (
                f"the tokens are not drawn from the target's distribution (p = {evidence.p_value:.1e}, "
                f"{alpha:.1e} is the limit); they look like: {likely.kind}"
            )
            finding.examples = [self._request(finding.check, number) for number in range(_EXAMPLES)]
        elif not finding.tokens:
            finding.why = (
                "the server returns no token ids, so the sampled tokens cannot be known; --reference-url compares texts"
            )
        elif not evidence.kinds:
            finding.verdict = OK
            finding.why = f"all {finding.answers} answers are as they must be"
        elif left := self._left(evidence, self._detectable(finding)):
            finding.why = f"no fault found; {finding.tokens} tokens do not exclude: {', '.join(left)}"
        else:
            rest = self._left(evidence, evidence.kinds)
            finding.verdict = OK
            finding.why = f"faults in {options.share:.0%} of the tokens are excluded"
            finding.why += f"; too subtle for this budget: {', '.join(rest)}" if rest else ""


def settle(options: ServerAuditOptions) -> str | None:
    """The dtype of the second copy of the weights that an audit with these options needs; None for none."""
    return options.numerics if isinstance(options.numerics, str) and options.numerics != "float32" else None


def worst(findings: Sequence[CheckResult]) -> str:
    """The verdict on the server: "FAIL" if a check failed, else "open" if one is, else "ok"."""
    verdicts = [finding.verdict for finding in findings]
    if FAIL in verdicts:
        return FAIL
    return OPEN if OPEN in verdicts or OK not in verdicts else OK
