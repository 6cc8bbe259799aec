"""Sample stories from stories260K (MIT, in the package) in large batches: training text for embedded:stories.

    python scripts/made_once/sample_stories.py OUT.jsonl --known tinystories.txt --known children.txt

Every story is sampled from its first token, at one temperature, and kept if the model ends it within its context.
Stories are left out if they occurred before, end within a sentence, repeat a word ("the the"), or have a word that is
in none of the files given as --known, because such a small model makes up words. OUT has one JSON object on each line,
{"text": story}, with a blank line between paragraphs.

The same seed, batch and version of torch give the same file. The engine would give the same distribution. This loop
has no rollback of caches and no separate requests, so it is several times as fast on one thread.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from draftproof.backends.loading.by_name import load_model
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.embedded import target_dir
from draftproof.files import whole_file
from draftproof.rng import fold

COMPACT = 32  # number of steps after which finished rows are removed from the batch
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
_REPEATED = re.compile(r"\b(\w+) \1\b", re.IGNORECASE)


class Writer:
    """A Llama that samples many texts at once; every row is at the same position.

    Args:
        model: a model of transformers, in float32.
    """

    def __init__(self, model: Any) -> None:
        config, inner = model.config, model.model
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps, self.context = config.head_dim, config.rms_norm_eps, config.max_position_embeddings
        self.begin, self.ends = config.bos_token_id, tuple(config.eos_token_id)
        self.embedding, self.head, self.norm = inner.embed_tokens.weight, model.lm_head.weight, inner.norm.weight
        cos, sin = inner.rotary_emb(self.embedding, position_ids=torch.arange(self.context).unsqueeze(0))
        low, high = sin[0].chunk(2, -1)
        self.cos, self.sin = cos[0], torch.cat((-low, high), -1)
        self.layers = [
            (
                layer.input_layernorm.weight,
                torch.cat([getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                layer.mlp.down_proj.weight,
            )
            for layer in inner.layers
        ]

    def step(self, ids: Tensor, place: int, cache: Tensor) -> Tensor:
        """Logits [rows, vocab] after one more token per row; keys and values go to cache[layer, 0 or 1, row, head]."""
        rows, turned = len(ids), self.heads + self.key_heads
        x = F.embedding(ids, self.embedding)
        for layer, (before, qkv, out, between, gate_up, down) in zip(cache, self.layers, strict=True):
            fused = F.linear(F.rms_norm(x, before.shape, before, self.eps), qkv).view(rows, -1, self.dim)
            heads = fused[:, :turned]
            heads = heads * self.cos[place] + heads.roll(self.dim // 2, -1) * self.sin[place]
            layer[0, :, :, place], layer[1, :, :, place] = heads[:, self.heads :], fused[:, turned:]
            keys, values = layer[:, :, :, : place + 1]
            queries = heads[:, : self.heads].reshape(rows, self.key_heads, -1, self.dim)  # grouped by key head
            x = x + F.linear(F.scaled_dot_product_attention(queries, keys, values).reshape(rows, -1), out)
            gate, up = F.linear(F.rms_norm(x, between.shape, between, self.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x, self.norm.shape, self.norm, self.eps), self.head)

    @torch.inference_mode()
    def write(self, rows: int, temperature: float, generator: torch.Generator) -> Iterator[list[int]]:
        """The tokens of the texts that end within the context, in the order in which they end."""
        cache = torch.empty(len(self.layers), 2, rows, self.key_heads, self.context, self.dim)
        tokens = torch.full((rows, self.context), self.begin)
        for place in range(self.context - 1):
            logits = self.step(tokens[:, place], place, cache)
            times = torch.empty_like(logits).exponential_(generator=generator)  # p / time is largest for a draw from p
            tokens[:, place + 1] = ((logits / temperature).softmax(-1) / times).argmax(-1)
            if place % COMPACT == COMPACT - 1 or place == self.context - 2:
                ended = torch.isin(tokens[:, 1 : place + 2], torch.tensor(self.ends)).any(1)
                for row in tokens[ended, 1 : place + 2].tolist():
                    yield row[: min(row.index(end) for end in self.ends if end in row)]
                tokens, cache = tokens[~ended], cache[:, :, ~ended]
            if not len(tokens):
                return


def words(text: str) -> set[str]:
    """The words of a text, in lower case."""
    return set(_WORD.findall(text.lower()))


def is_sound(text: str, known: set[str]) -> bool:
    """Whether a story ends with a sentence, has no word twice in a row, and has known words only."""
    ended = text.rstrip("\"'").endswith((".", "!", "?"))
    return ended and not _REPEATED.search(text) and (not known or words(text) <= known)


class Collection:
    """Distinct sound stories, and the number of stories that were begun.

    Args:
        known: the words that stories may use; all words if empty.
    """

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.kept: dict[str, None] = {}
        self.begun = self.ended = self.size = 0

    def add(self, text: str) -> None:
        """Keep a story that has ended, if it is sound and new."""
        self.ended += 1
        if is_sound(text, self.known) and text not in self.kept:
            self.kept[text] = None
            self.size += len(text.encode())

    def __str__(self) -> str:
        return f"{self.begun} begun, {self.ended} ended, {len(self.kept)} kept, {self.size / 1e6:.2f} MB"


def collect(options: argparse.Namespace) -> Collection:
    """Sample batches until there is enough text; progress goes to stderr."""
    found = Collection(words("\n".join(path.read_text(encoding="utf-8") for path in options.known)))
    source = str(target_dir())
    tokenizer, writer = load_tokenizer(source), Writer(load_model(source, LoadOptions(dtype="float32", device="cpu")))
    start = time.perf_counter()
    while found.size < options.megabytes * 1e6:
        generator = torch.Generator().manual_seed(fold(options.seed, found.begun) >> 1)
        found.begun += options.batch
        for ids in writer.write(options.batch, options.temperature, generator):
            found.add(re.sub(r"\s*\n\s*", "\n\n", tokenizer.decode(ids, skip_special_tokens=True).strip()))
        print(f"{found}, {found.size / 1e3 / (time.perf_counter() - start):.1f} KB/s", file=sys.stderr)
    return found


def main() -> int:
    """Write OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="file to write, .jsonl")
    parser.add_argument("--megabytes", type=float, default=7, help="least size of all stories")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=256, help="number of stories in a batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known", type=Path, action="append", default=[], help="text whose words a story may use")
    options = parser.parse_args()
    try:
        found = collect(options)
        with whole_file(options.out) as work:
            work.write_text("".join(json.dumps({"text": text}) + "\n" for text in found.kept), encoding="utf-8")
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
