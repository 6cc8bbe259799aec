"""Sample instructions from a chat model: it continues the beginning of a user's turn (Magpie, arXiv 2406.08464).

    python scripts/made_once/sample_instructions.py OUT.jsonl --target smollm2-135m --dtype bfloat16 --count 1500

A drafter learns from the model's own answers, and needs the answers to many different instructions. The model gets its
chat template up to the first word of the user, and writes the user's turn. Instructions are left out if they occurred
before, do not end within the limit, or have fewer than three words or several paragraphs. OUT has one JSON object on
each line, {"instruction": text}, for `draftproof train feature-head --prompts`.

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
PATIENCE = 8  # number of batches without a new instruction after which the script stops


def opening(engine: Engine) -> list[int]:
    """Token ids of the chat template up to the first word of the user."""
    text = engine.prompts.chat_text([{"role": "user", "content": MARK}])
    if text.count(MARK) != 1:
        raise UserError(f"the chat template of {engine.target.name} does not show the user's words exactly once")
    return list(engine.tokenizer(text[: text.index(MARK)], add_special_tokens=False)["input_ids"])


def is_sound(text: str) -> bool:
    """Whether a text can be an instruction: three words or more in one paragraph."""
    return len(text.split()) >= 3 and "\n\n" not in text


def collect(options: argparse.Namespace) -> list[str]:
    """Sample batches until there are enough instructions; progress goes to stderr."""
    engine = Engine.load(options.target, drafter="none", dtype=options.dtype, max_batch=options.batch)
    begin, kept, begun, start = opening(engine), dict[str, None](), 0, time.perf_counter()
    last = 0  # value of `begun` at the last new instruction
    while len(kept) < options.count:
        if begun - last >= PATIENCE * options.batch:
            raise UserError(
                f"{engine.target.name} wrote {begun} instructions, and {len(kept)} could be kept, none of the last "
                f"{PATIENCE} batches: use a higher --temperature or --longest, or a smaller --count"
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
                last = begun + options.batch
        begun += options.batch
        print(f"{len(kept)} of {begun} kept, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return list(kept)[: options.count]


def main() -> int:
    """Write OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="file to write, .jsonl")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--count", type=int, default=1500, help="number of instructions to keep")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--longest", type=int, default=80, help="largest number of tokens in an instruction")
    parser.add_argument("--batch", type=int, default=32, help="number of instructions in a batch")
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
