"""How well story models read: continuations of held-out openings, judged by a larger model and by a list of words.

    python benchmarks/readability.py --texts texts/tinystories.txt --known texts/children.txt --judge smollm2-135m \
        --models embedded:stories embedded:target --out docs/results/readability

Every model continues the same openings with the same seeds; the continuations, and those that the stories really have,
are cut to the same length. The judge's bits per byte say how much a continuation surprises a model that read far more;
a word is coined if it is in none of the texts and word lists. Writes OUT.md with six continuations of each in full.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch

from draftproof import Engine, SamplingParams, models
from draftproof.backends.loading import load_model
from draftproof.tokenization import load_tokenizer
from draftproof.training.data import Example, read_examples, split

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
Pairs = list[tuple[str, str]]  # openings and what follows


def words(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return _WORD.findall(text.lower())


def cut(text: str, size: int) -> str:
    """At most `size` characters, whole words, one line end between paragraphs."""
    text = re.sub(r"\s*\n\s*", "\n", text)
    return text if len(text) <= size else text[: text.rfind(" ", 0, size)]


def continued(name: str, openings: list[str], temperature: float, args: argparse.Namespace) -> Pairs:
    """What a model makes of the openings, plainly decoded."""
    engine = Engine.load(name, max_batch=16)
    params = [
        SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=seed) for seed in range(len(openings))
    ]
    outputs = engine.generate(list(openings), params)
    return [(opening, cut(out.text, args.size)) for opening, out in zip(openings, outputs, strict=True)]


class Judge:
    """A model that reads; bits per byte of what follows an opening.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        source = models.resolve(name)
        self.tokenizer = load_tokenizer(source)
        self.model: Any = load_model(source, dtype="float32").eval()

    @torch.inference_mode()
    def __call__(self, pairs: Pairs) -> float:
        """Bits per byte over all pairs."""
        bits, size = 0.0, 0
        for opening, text in pairs:
            given = self.tokenizer(cut(opening, len(opening)))["input_ids"]
            ids = given + self.tokenizer(text, add_special_tokens=False)["input_ids"]
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, len(given) - 1 : -1].float()
            found = logits.log_softmax(-1)[torch.arange(len(ids) - len(given)), torch.tensor(ids[len(given) :])]
            bits -= float(found.sum()) / math.log(2)
            size += len(text.encode())
        return bits / size


def row(title: str, pairs: Pairs, judge: Judge, known: set[str]) -> str:
    """A line of the table."""
    told = [word for _, text in pairs for word in words(text.rpartition(" ")[0])]  # the last word may be cut off
    coined = sum(word not in known for word in told)
    return f"| {title} | {judge(pairs):.3f} | {100 * coined / len(told):.2f}% |"


def report(args: argparse.Namespace, examples: list[Example]) -> str:
    """The document."""
    read = "\n".join(path.read_text(encoding="utf-8") for path in [*args.texts, *args.known])
    known, judge = set(words(read)), Judge(args.judge)
    openings = [example.prompt for example in examples]
    real = [(each.prompt, cut(each.text[len(each.prompt) :], args.size)) for each in examples]
    lines = [row("the stories themselves", real, judge, known)]
    shown = []
    for name in args.models:
        for temperature in args.temperature:
            pairs = continued(name, openings, temperature, args)
            title = f"{Path(name).name if Path(name).is_absolute() else name}, temperature {temperature:g}"
            lines.append(row(title, pairs, judge, known))
            print(lines[-1], file=sys.stderr)
            shown += [f"## {title}", ""]
            for opening, text in pairs[: args.shown]:
                told = f"**{opening}** {text.strip()}".replace("\n", " / ")
                shown += [f"- {told}"]
            shown += [""]
    head = [
        "# How story models read",
        "",
        (
            f"{len(examples)} held-out openings, up to {args.size} characters after each, seeds 0 to "
            f"{len(examples) - 1}; judge {args.judge} in float32."
        ),
        "",
        f"| continuations by | bits per byte under {args.judge} | coined words |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *lines, "", *shown]).rstrip() + "\n"


def main() -> int:
    """Write OUT.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="stories; their held-out tenth is used")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="further text whose words count as English")
    parser.add_argument("--judge", default="smollm2-135m")
    parser.add_argument("--models", nargs="+", default=["embedded:stories", "embedded:target"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--count", type=int, default=48, help="openings")
    parser.add_argument("--size", type=int, default=400, help="characters after each")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--shown", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    examples, _ = read_examples(args.texts, form="stories")
    args.out.with_suffix(".md").write_text(report(args, split(examples)["test"][: args.count]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
