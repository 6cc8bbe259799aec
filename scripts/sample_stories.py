"""Sample stories from stories260K (MIT, in the package) in large batches: text that embedded:stories learns from.

    python scripts/sample_stories.py OUT.jsonl --known tinystories.txt --known children.txt

Every story is drawn from the model's first token on, at one temperature, and kept if the model ends it within its
context. Left out are stories told already, those that end within a sentence, those that stammer ("the the"), and those
with a word that is in none of the files given as --known: a model this small coins words. OUT holds one JSON object a
line, {"text": story}, with a blank line between paragraphs.

The same seed, batch and version of torch give the same file. The engine would give the same law; this loop has no
caches to roll back and no requests to keep apart, and so is several times as fast on one thread.
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

from draftproof.backends.hf import load_model
from draftproof.embedded import target_dir
from draftproof.files import whole_file
from draftproof.rng import fold
from draftproof.tokenization import load_tokenizer

COMPACT = 32  # steps after which rows that have ended leave the batch
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
_STAMMER = re.compile(r"\b(\w+) \1\b", re.IGNORECASE)


class Writer:
    """A Llama that writes many texts in step; every row is at the same position.

    Args:
        model: of transformers, in float32.
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
        """Logits [rows, vocab] after one more token a row; keys and values go to cache[layer, 0 or 1, row, head]."""
        rows, turned = len(ids), self.heads + self.key_heads
        x = F.embedding(ids, self.embedding)
        for layer, (before, qkv, out, between, gate_up, down) in zip(cache, self.layers, strict=True):
            fused = F.linear(F.rms_norm(x, before.shape, before, self.eps), qkv).view(rows, -1, self.dim)
            heads = fused[:, :turned]
            heads = heads * self.cos[place] + heads.roll(self.dim // 2, -1) * self.sin[place]
            layer[0, :, :, place], layer[1, :, :, place] = heads[:, self.heads :], fused[:, turned:]
            keys, values = layer[:, :, :, : place + 1]
            queries = heads[:, : self.heads].reshape(rows, self.key_heads, -1, self.dim)  # those of a key together
            x = x + F.linear(F.scaled_dot_product_attention(queries, keys, values).reshape(rows, -1), out)
            gate, up = F.linear(F.rms_norm(x, between.shape, between, self.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x, self.norm.shape, self.norm, self.eps), self.head)

    @torch.inference_mode()
    def write(self, rows: int, temperature: float, generator: torch.Generator) -> Iterator[list[int]]:
        """The tokens of the texts that end within the context, as they end."""
        cache = torch.empty(len(self.layers), 2, rows, self.key_heads, self.context, self.dim)
        told = torch.full((rows, self.context), self.begin)
        for place in range(self.context - 1):
            logits = self.step(told[:, place], place, cache)
            waits = torch.empty_like(logits).exponential_(generator=generator)  # the first of an exponential race
            told[:, place + 1] = ((logits / temperature).softmax(-1) / waits).argmax(-1)
            if place % COMPACT == COMPACT - 1 or place == self.context - 2:
                ended = torch.isin(told[:, 1 : place + 2], torch.tensor(self.ends)).any(1)
                for row in told[ended, 1 : place + 2].tolist():
                    yield row[: min(row.index(end) for end in self.ends if end in row)]
                told, cache = told[~ended], cache[:, :, ~ended]
            if not len(told):
                return


def words(text: str) -> set[str]:
    """The words of a text, in small letters."""
    return set(_WORD.findall(text.lower()))


def is_sound(text: str, known: set[str]) -> bool:
    """Whether a story ends where a sentence does, repeats no word at once and uses known words only."""
    ended = text.rstrip("\"'").endswith((".", "!", "?"))
    return ended and not _STAMMER.search(text) and (not known or words(text) <= known)


class Collection:
    """Distinct sound stories, and how many were begun for them.

    Args:
        known: the words that stories may use; without any they may use all.
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
    """Batch after batch until there is enough; progress goes to stderr."""
    found = Collection(words("\n".join(path.read_text(encoding="utf-8") for path in options.known)))
    source = str(target_dir())
    tokenizer, writer = load_tokenizer(source), Writer(load_model(source, dtype="float32", device="cpu"))
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
    parser.add_argument("--megabytes", type=float, default=7, help="of stories; ends with the batch that reaches this")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=256, help="stories written at a time")
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
