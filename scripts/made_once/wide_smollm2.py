"""Write a .gguf file with the shapes of a larger model that computes what SmolLM2-135M computes.

    python scripts/made_once/wide_smollm2.py SMOLLM2.gguf OUT.gguf [--shape 7b|1.5b|0.4b|135m] [--without 13-18]
        [--vocab 151936]

Real weights of that size cannot always be had, and random ones write texts that no draft predicts. Here hidden states
have 1,536 numbers (3,584 for 7 B) of which 576 are SmolLM2's and the others 0, heads and gated inputs are added whose
outputs are multiplied by 0, and norms are scaled for the greater width. So texts, and with them accepted drafts, are
those of SmolLM2 but for rounding; the bytes and operations of a token are those of 1.5 B weights, which no engine can
skip, as they are stored like all others. A draft for it has 0.4 B weights and lacks some of the layers, like
`smollm2-135m-draft`. A larger vocabulary repeats the rows of the rarest tokens, so that the likeliest tokens stay.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

DIM, GROUP = 64, 3
"""Of a head; and query heads that share a key head, in all shapes."""


class Shape(NamedTuple):
    """The sizes of the model that is written."""

    hidden: int
    gated: int
    key_heads: int

    def of_tensors(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each kind of tensor."""
        keys = self.key_heads * DIM
        return {
            "attn_q": (GROUP * keys, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, GROUP * keys),
            "ffn_gate": (self.gated, self.hidden),
            "ffn_up": (self.gated, self.hidden),
            "ffn_down": (self.hidden, self.gated),
        }


SHAPES = {
    "7b": Shape(3584, 18944, 16),
    "1.5b": Shape(1536, 8960, 8),
    "0.4b": Shape(960, 4864, 5),
    "135m": Shape(576, 1536, 3),
}
_WITH_OTHERS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
"""Whose further outputs are random numbers; those of the others are 0."""
_RARE = 8192
"""The last so many tokens, whose rows a larger vocabulary repeats."""


@functools.cache
def random_rows(outs: int, ins: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Small random numbers; matrices of one form have the same."""
    numbers = np.random.default_rng(outs + ins).normal(0, 0.02, (outs, ins)).astype(np.float32)
    return gguf.quants.quantize(numbers, kind)


def widened(tensor: Any, shape: Shape, vocab: int = 0) -> np.ndarray:
    """The bytes of a tensor in the wide model, [outputs, bytes], or its numbers where it is a norm."""
    part = tensor.name.split(".")[-2]
    if part.endswith("norm"):
        scale = np.sqrt(len(tensor.data) / shape.hidden).astype(np.float32)
        return np.concatenate([tensor.data * scale, np.ones(shape.hidden - len(tensor.data), np.float32)])
    block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    outs, ins = shape.of_tensors().get(part, (max(len(tensor.data), vocab), shape.hidden))
    made = np.zeros((outs, ins // block * size), np.uint8)
    if part in _WITH_OTHERS:
        made[:] = random_rows(outs, ins, tensor.tensor_type)
    rows, width = tensor.data.shape
    made[:rows] = 0
    made[:rows, :width] = tensor.data
    if outs > rows and part not in shape.of_tensors():
        made[rows:, :width] = tensor.data[rows - _RARE + np.arange(outs - rows) % _RARE]
    return made


def of_more_tokens(name: str, value: Any, vocab: int) -> Any:
    """What metadata say of a larger vocabulary."""
    if not vocab:
        return value
    if name == "tokenizer.ggml.tokens":
        return value + [f"<more {number}>" for number in range(len(value), vocab)]
    if name == "tokenizer.ggml.token_type":
        return value + [1] * (vocab - len(value))
    return vocab if name == "llama.vocab_size" else value


def main() -> None:
    """Read one file and write the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--vocab", type=int, default=0, help="number of tokens, at least as many as there are")
    parser.add_argument("--without", metavar="FIRST-LAST", help="layers to leave out, such as 13-18")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    read = gguf.GGUFReader(options.source)
    writer = gguf.GGUFWriter(options.out, "llama")
    layers = list(range(int(read.fields["llama.block_count"].contents())))
    if options.without:
        first, last = map(int, options.without.split("-"))
        layers = [layer for layer in layers if not first <= layer <= last]
    replaced = {
        "block_count": len(layers),
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.gated,
        "attention.head_count": shape.key_heads * GROUP,
        "attention.head_count_kv": shape.key_heads,
    }
    eps_name = "llama.attention.layer_norm_rms_epsilon"
    narrow = int(read.fields["llama.embedding_length"].contents())
    for name, field in read.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = replaced.get(name.removeprefix("llama."), field.contents())
        if name == eps_name:
            value = value * narrow / shape.hidden  # a sum of as many squares, divided by more
        value = of_more_tokens(name, value, options.vocab)
        if name == "general.name":
            value = f"SmolLM2 135M at the shapes of {options.shape}"
        element = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, value, field.types[0], element)
    for name in ("key_length", "value_length"):  # else it is the width divided by the number of heads
        writer.add_uint32(f"llama.attention.{name}", DIM)
    for tensor in read.tensors:
        name = tensor.name
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            if int(layer) not in layers:
                continue
            name = f"blk.{layers.index(int(layer))}.{rest}"
        writer.add_tensor(name, widened(tensor, shape, options.vocab), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


if __name__ == "__main__":
    main()
