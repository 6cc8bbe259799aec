"""Sample instructions from a chat model itself: it continues the beginning of a user's turn (Magpie, arXiv 2406.08464).

    python scripts/sample_instructions.py OUT.jsonl --target smollm2-135m --dtype bfloat16 --count 1500

What a drafter should learn is the model's own answers, and those to few instructions are soon known by heart. Here the
model is given its chat template up to where a user would write, and writes that turn until it ends it. Left out are
instructions told already, those that do not end in time, and those of fewer than three words or of several paragraphs.
OUT holds one JSON object a line, {"instruction": text}, for `draftproof train feature-head --prompts`.

The same seed, batch and version of torch give the same file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from draftproof import Engine, SamplingParams, UserError
from draftproof.files import whole_file
from draftproof.rng import fold

MARK = "\N{BLACK FLAG}here"
IN_VAIN = 8  # batches without a new instruction after which there will be none


def opening(engine: Engine) -> list[int]:
    """Token ids of the chat template up to the user's first word."""
    text = engine.chat_text([{"role": "user", "content": MARK}])
    if text.count(MARK) != 1:
        raise UserError(f"the chat template of {engine.target.name} does not show a user's words as they are")
    return list(engine.tokenizer(text[: text.index(MARK)], add_special_tokens=False)["input_ids"])


def is_sound(text: str) -> bool:
    """Whether a text can be an instruction: three words or more in one paragraph."""
    return len(text.split()) >= 3 and "\n\n" not in text


def collect(options: argparse.Namespace) -> list[str]:
    """Batch after batch until there are enough; progress goes to stderr."""
    engine = Engine.load(options.target, dtype=options.dtype, max_batch=options.batch)
    begin, kept, begun, start = opening(engine), dict[str, None](), 0, time.perf_counter()
    fruitful = 0  # begun when the last new one came
    while len(kept) < options.count:
        if begun - fruitful >= IN_VAIN * options.batch:
            raise UserError(
                f"{engine.target.name} wrote {len(kept)} instructions of {begun}, and nothing new in the last "
                f"{IN_VAIN} batches: raise --temperature or --longest, or ask for fewer with --count"
            )
        params = SamplingParams(
            n=options.batch,
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=options.longest,
            seed=fold(options.seed, begun) >> 1,
        )
        for output in engine.generate([begin], params):
            text = output.text.strip()
            if output.finish_reason == "stop" and is_sound(text) and text not in kept:
                kept[text] = None
                fruitful = begun + options.batch
        begun += options.batch
        print(f"{len(kept)} of {begun} kept, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return list(kept)[: options.count]


def main() -> int:
    """Write OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="file to write, .jsonl")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--count", type=int, default=1500, help="instructions to keep")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--longest", type=int, default=80, help="tokens of an instruction")
    parser.add_argument("--batch", type=int, default=32, help="instructions written at a time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        lines = [json.dumps({"instruction": text}) + "\n" for text in collect(options)]
        with whole_file(options.out) as work:
            work.write_text("".join(lines), encoding="utf-8")
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
