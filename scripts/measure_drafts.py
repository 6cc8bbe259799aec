"""Tokens a round of a model that drafts for itself with 4-bit weights, and what that is worth at the costs of others.

    python scripts/measure_drafts.py smollm2-135m MODEL ... [--costs SHAPES.json] [--out docs/results/drafts]

Acceptance is measured on real models, and costs do not depend on what weights say (`measure_shapes.py`). So speeds of
larger models follow from both: tokens a round over the time of a round, in plain tokens. They leave out the rule.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import common

from draftproof import Engine, SamplingParams
from draftproof.provenance import run_facts
from draftproof.results import Results, table

OPENINGS = (
    "The old lighthouse keeper looked out at the storm and",
    "Explain how a bicycle stays upright.",
    'def quicksort(items):\n    """Sort a list."""\n',
    "Question: Tom has 3 boxes with 12 apples each. He sells 7. How many are left?\nAnswer:",
    "The history of the Roman Empire begins",
    "Dear Sir or Madam,\nI am writing to complain about",
)
RULES = (("token", 4), ("block", 5), ("block", 7))  # verifier and draft length
VERIFIED = 5  # drafted tokens that the costs' verification reads
SAMPLES = {0.0: 1, 1.0: 3}  # answers to each opening, by temperature


class Recorder:
    """A verifier that notes how many drafted tokens each round had, and how many were accepted.

    Args:
        rule: the verifier that decides.
    """

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self.rounds: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def verify(self, drafts: Sequence[Any], *given: Any) -> Any:
        """The rule's verdicts, whose lengths are recorded."""
        made = self._rule.verify(drafts, *given)
        self.rounds += [(len(draft), len(one.path)) for draft, one in zip(drafts, made, strict=True) if len(draft)]
        return made


def measured(target: str, verifier: str, length: int, tokens: int) -> dict[float, list[tuple[int, int]]]:
    """Drafted and accepted tokens of each round, by temperature."""
    engine = Engine.load(target, dtype="bfloat16", drafter="quantized:4", stopper=f"fixed:{length}", verifier=verifier)
    recorder = engine.verifier = Recorder(engine.verifier)
    found = {}
    for temperature, samples in SAMPLES.items():
        recorder.rounds = []
        for number, opening in enumerate(OPENINGS):
            for sample in range(samples):
                params = SamplingParams(
                    temperature=temperature, max_tokens=tokens, seed=10 * number + sample, ignore_eos=True
                )
                engine.generate([opening], params)
        found[temperature] = recorder.rounds
        print(target, verifier, length, temperature, file=sys.stderr)
    return found


def costs_of(path: Path) -> dict[str, tuple[float, float]]:
    """Costs of a drafted token and of each verified one, in plain tokens, by shape and context."""
    seconds = json.loads(path.read_text(encoding="utf-8"))["seconds"]
    found = {}
    for name, each in seconds.items():
        draft, verify = (
            median(one / plain for one, plain in zip(each[key], each["plain"], strict=True))
            for key in ("draft", "verify")
        )
        found[name] = draft, (verify - 1) / VERIFIED
    return found


def main() -> None:
    """Measure, print the table and write it."""
    parser = common.parser(__doc__)
    parser.add_argument("targets", nargs="+", help="a registered name, a hub id or a directory")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--costs", type=Path, help="results of measure_shapes.py, the .json")
    parser.add_argument("--shape", nargs="+", default=["qwen2.5-1.5b, 64", "qwen2.5-1.5b, 1024"], help="of the costs")
    options = parser.parse_args()
    known = {} if options.costs is None else costs_of(options.costs)
    if missing := [name for name in options.shape if known and name not in known]:
        sys.exit(f"shape in {options.costs}: expected one of {'; '.join(known)}, got {missing[0]!r}")
    facts, rows, raw = run_facts(), [], {}
    for target in options.targets:
        for verifier, length in RULES:
            for temperature, rounds in measured(target, verifier, length, options.tokens).items():
                name = Path(target).name
                raw[f"{name}, {verifier}, {length}, {temperature:g}"] = rounds
                accepted = sum(taken for _, taken in rounds)
                decided = accepted + sum(taken < drafted for drafted, taken in rounds)
                made = [taken + 1 for drafted, taken in rounds if drafted == length]
                error = pstdev(made) / len(made) ** 0.5
                gains = [
                    f"{fmean(made) / (1 + length * (draft + verify)):.2f}"
                    for draft, verify in (known[shape] for shape in options.shape if known)
                ]
                shown = f"{fmean(made):.2f} ± {error:.2f}"
                rows.append([name, verifier, length, f"{temperature:g}", f"{accepted / decided:.3f}", shown, *gains])
    heads = ["model", "rule", "drafted", "temperature", "accepted after an accepted one", "tokens a round"]
    heads += [f"speed-up at the costs of {shape}" for shape in options.shape if known]
    results = Results(
        title="Drafts of a model's own 4-bit weights",
        lines=[
            f"Drafter `quantized:4`, bfloat16, {len(OPENINGS)} openings, answers of {options.tokens} tokens, at",
            f"temperature 1 {SAMPLES[1.0]} each. Tokens a round: of rounds with whole drafts, with the standard error",
            "of the mean over rounds. Speed-ups over plain decoding are these tokens over the time of a round at the",
            "costs of larger shapes; they are computed, and leave out the rule.",
            "",
            *table(heads, rows),
        ],
        figures={"rounds": raw},
        facts=facts,
    )
    common.deliver(options, results)


if __name__ == "__main__":
    main()
