"""What predicted outputs gain: tokens a second with and without a prediction, on one machine, in turns.

    python scripts/measure_predictions.py [TARGET]

The target repeats passages of this repository's code. Its answer is the first prediction; the second has every
twentieth word replaced, the third is the passage itself, the fourth one that has nothing to do with it. Prints a table
in Markdown.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from statistics import median

from draftproof import Engine, SamplingParams
from draftproof.engine.request import Output

SOURCES = ("tree.py", "files.py", "sampling.py", "finish.py", "draft.py", "rng.py")
ROUNDS = 3
COUNTED = ("num_draft_tokens", "num_accepted_tokens", "num_accepted_prediction_tokens")
PACKAGE = Path(__file__).parent.parent / "src" / "draftproof"


def passage(name: str) -> str:
    """Some lines of a file."""
    lines = (PACKAGE / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[-60:-30])


def edited(text: str) -> str:
    """A text with every twentieth word replaced."""
    words = text.split(" ")
    for place in range(random.Random(1).randrange(20), len(words), 20):
        words[place] = "changed"
    return " ".join(words)


def run(
    engine: Engine, prompts: list[list[dict[str, str]]], params: SamplingParams, texts: list[str | None]
) -> list[Output]:
    """Answers one after another, as one user gets them."""
    return [
        engine.generate([prompt], params, predictions=[text])[0] for prompt, text in zip(prompts, texts, strict=True)
    ]


def speed(outputs: list[Output]) -> float:
    """Tokens a second over all answers."""
    return sum(each.stats.num_tokens for each in outputs) / sum(each.stats.seconds.total for each in outputs)


def main() -> None:
    """Measure and print."""
    target = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    plain = Engine.load(target, drafter="none", dtype="bfloat16")
    auto = Engine.load(target, dtype="bfloat16")
    passages = [passage(name) for name in SOURCES]
    prompts = [[{"role": "user", "content": f"Repeat this code:\n\n{text}"}] for text in passages]
    heads = ("temperature", "case", "tokens a second", "beside plain", "tokens per call", *COUNTED)
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=128, seed=None if temperature == 0 else 1)
        nothing: list[str | None] = [None] * len(prompts)
        answers = [output.text for output in run(auto, prompts, params, nothing)]  # a seed gives them again
        cases: dict[str, tuple[Engine, list[str | None]]] = {
            "plain decoding": (plain, nothing),
            "auto, no prediction": (auto, nothing),
            "auto, the answer": (auto, list(answers)),
            "auto, the answer with 1 of 20 words replaced": (auto, [edited(text) for text in answers]),
            "auto, the passage": (auto, list(passages)),
            "auto, another text": (auto, [passages[place - 1] for place in range(len(passages))]),
        }
        for engine, texts in cases.values():
            run(engine, prompts[:2], params, texts[:2])
        made: dict[str, list[list[Output]]] = {name: [] for name in cases}
        for _ in range(ROUNDS):
            for name, (engine, texts) in cases.items():
                made[name].append(run(engine, prompts, params, texts))
        base = median(map(speed, made["plain decoding"]))
        for name, rounds in made.items():
            found = median(map(speed, rounds))
            stats = [each.stats for each in rounds[0]]
            calls = sum(each.num_tokens for each in stats) / sum(each.num_target_calls for each in stats)
            counts = " | ".join(str(sum(getattr(each, name) for each in stats)) for name in COUNTED)
            print(
                f"| {temperature:g} | {name} | {found:.1f} | {found / base:.2f} | {calls:.2f} | {counts} |", flush=True
            )


if __name__ == "__main__":
    main()
