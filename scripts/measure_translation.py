"""What two vocabularies share, and what it costs to translate between them, for draft models with another tokenizer.

    python scripts/measure_translation.py NAME=TOKENIZER NAME=TOKENIZER ... [--model NAME=MODEL] [--tokens N]

A tokenizer is a directory, a hub id or a .gguf file. For each two of them, in both directions, it prints a row of a
Markdown table: how many tokens of the draft have one of the target (token-level intersection), which share of the
target's tokens that is, in its vocabulary and in the questions of three data sets (prose, instructions, code), how many
tokens of the draft write one of the target's, beside those of the text encoded as a whole, and what translating a token
and picking the shared columns of a row take, as the least processor time of several runs.

With `--model` the named target reads N tokens of each data set, and the probability that it gives to shared tokens is
summed. A draft model accepts at most that: a draft with the target's own distribution, limited to shared tokens, is
accepted with exactly this probability.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import torch

from draftproof.backends.base import Feed
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.backends.translation.token_map import TokenContents, TokenMap, map_tokens
from draftproof.bench.questions import read_questions
from draftproof.tree import TokenTree

DATASETS = ("fiction", "mt-bench", "humaneval")
RUNS = 20  # of which the fastest counts
KNOWN = 8  # tokens before the first one whose row is read


def texts(dataset: str) -> str:
    """The questions of a data set, one after another."""
    return "\n\n".join(turn for question in read_questions(dataset) for turn in question.turns)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without those before it."""
    found: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return found


def least_microseconds(run: Callable[[], object]) -> float:
    """Processor time of the fastest of several runs, after one that does not count."""
    run()
    found = []
    for _ in range(RUNS):
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return 1e6 * min(found)


def translated(tokens: TokenMap, ids: Sequence[int]) -> list[tuple[int, ...]]:
    """The draft's tokens for each of the target's."""
    return [tokens.spelled(each) for each in ids]


@torch.inference_mode()
def shared_mass(target: Any, tokens: TokenMap, ids: Sequence[int]) -> float:
    """The mean probability that a target gives to shared tokens, along a text."""
    session = target.open()
    chain = TokenTree.chain(torch.tensor(ids[KNOWN:]))
    (output,) = target.forward([Feed(session, list(ids[:KNOWN]), chain)])
    session.close()
    rows = output.logits.float().softmax(-1)
    return float(rows[:, tokens.target_ids[tokens.target_ids < rows.shape[1]]].sum(-1).mean())


def named(text: str) -> tuple[str, str]:
    """The name and the source of NAME=SOURCE."""
    name, equal, source = text.partition("=")
    if not equal:
        raise argparse.ArgumentTypeError(f"expected NAME=TOKENIZER, got {text!r}")
    return name, source


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tokenizers", nargs="+", type=named, metavar="NAME=TOKENIZER")
    parser.add_argument("--model", type=named, metavar="NAME=MODEL", help="a target among the names")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each data set that the target reads")
    given = parser.parse_args()
    made = {name: load_tokenizer(source) for name, source in given.tokenizers}
    contents = {name: TokenContents(each) for name, each in made.items()}
    read = {name: {each: encoded(tokenizer, texts(each)) for each in DATASETS} for name, tokenizer in made.items()}
    target_name, model = given.model or ("", "")
    target = load(model, LoadOptions(plainly=True)).backend if model else None
    heads = (
        "target, draft",
        "tokens of the draft that are shared",
        "of the target's vocabulary",
        f"in {', '.join(DATASETS)}",
        "draft's tokens for one of the target's; whole text",
        "a token, and the columns of a row, us",
        "making the map, s",
        "shared probability",
    )
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for ours, theirs in permutations(made, 2):
        begin = time.process_time()
        tokens = map_tokens(contents[ours], contents[theirs])
        seconds = time.process_time() - begin
        whole = [each for dataset in DATASETS for each in read[ours][dataset]]
        shares = ", ".join(f"{tokens.share(read[ours][dataset]):.3f}" for dataset in DATASETS)
        written = tokens.positions(whole) / len(whole)
        again = sum(map(len, read[theirs].values())) / len(whole)
        row, columns = torch.randn(1, len(contents[theirs].vocab)), tokens.draft_ids
        costs = (
            least_microseconds(partial(translated, tokens, whole)) / len(whole),
            least_microseconds(partial(row.index_select, 1, columns)),
        )
        mass = "not measured"
        if target is not None and ours == target_name:
            found = [shared_mass(target, tokens, read[ours][dataset][: given.tokens]) for dataset in DATASETS]
            mass = ", ".join(f"{each:.3f}" for each in found) + f"; mean {statistics.mean(found):.3f}"
        print(
            f"| {ours}, {theirs} | {len(tokens):,} of {len(contents[theirs].vocab):,} "
            f"| {len(tokens) / len(contents[ours].vocab):.3f} | {shares} | {written:.3f}; {again:.3f} "
            f"| {costs[0]:.2f}, {costs[1]:.0f} | {seconds:.1f} | {mass} |"
        )


if __name__ == "__main__":
    main()
