"""Write a .gguf file with the shapes of a 1.5 B model that computes what SmolLM2-135M computes.

    python scripts/made_once/wide_smollm2.py SMOLLM2.gguf OUT.gguf

Real weights of that size cannot always be had, and random ones write texts that no draft predicts. Here hidden states
have 1,536 numbers of which 960 are 0, heads and gated inputs are added whose outputs are multiplied by 0, and norms are
scaled for the greater width. So texts, and with them accepted drafts, are those of SmolLM2 but for rounding; the bytes
and operations of a token are those of 1.5 B weights, which no engine can skip, as they are stored like all others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, GATED, KEY_HEADS, DIM, GROUP = 1536, 8960, 8, 64, 3
"""Of the wide model; a key head serves GROUP query heads in both."""

_REPLACED = {
    "embedding_length": HIDDEN,
    "feed_forward_length": GATED,
    "attention.head_count": KEY_HEADS * GROUP,
    "attention.head_count_kv": KEY_HEADS,
}
_SHAPES = {  # outputs and inputs
    "attn_q": (KEY_HEADS * GROUP * DIM, HIDDEN),
    "attn_k": (KEY_HEADS * DIM, HIDDEN),
    "attn_v": (KEY_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, KEY_HEADS * GROUP * DIM),
    "ffn_gate": (GATED, HIDDEN),
    "ffn_up": (GATED, HIDDEN),
    "ffn_down": (HIDDEN, GATED),
}
_WITH_OTHERS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
"""Whose further outputs are random numbers; those of the others are 0."""


def widened(tensor: Any, rng: np.random.Generator) -> np.ndarray:
    """The bytes of a tensor in the wide model, [outputs, bytes], or its numbers where it is a norm."""
    part = tensor.name.split(".")[-2]
    if part.endswith("norm"):
        scale = np.sqrt(len(tensor.data) / HIDDEN).astype(np.float32)
        return np.concatenate([tensor.data * scale, np.ones(HIDDEN - len(tensor.data), np.float32)])
    block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    outs, ins = _SHAPES.get(part, (len(tensor.data), HIDDEN))
    made = np.zeros((outs, ins // block * size), np.uint8)
    if part in _WITH_OTHERS:
        numbers = rng.normal(0, 0.02, (outs, ins)).astype(np.float32)
        made[:] = gguf.quants.quantize(numbers, tensor.tensor_type)
    rows, width = tensor.data.shape
    made[:rows] = 0
    made[:rows, :width] = tensor.data
    return made


def main() -> None:
    """Read one file and write the other."""
    source, out = map(Path, sys.argv[1:])
    read = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "llama")
    eps_name = "llama.attention.layer_norm_rms_epsilon"
    narrow = int(read.fields["llama.embedding_length"].contents())
    for name, field in read.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = _REPLACED.get(name.removeprefix("llama."), field.contents())
        if name == eps_name:
            value = value * narrow / HIDDEN  # a sum of as many squares, divided by more
        if name == "general.name":
            value = "SmolLM2 135M at the shapes of 1.5 B"
        element = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, value, field.types[0], element)
    rng = np.random.default_rng(0)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, widened(tensor, rng), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


if __name__ == "__main__":
    main()
