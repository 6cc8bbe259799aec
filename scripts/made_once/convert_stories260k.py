"""Convert stories260K from the files of llama2.c to the embedded target and draft directories, for transformers.

    python scripts/made_once/convert_stories260k.py tests/support/data/stories260K src/draftproof/embedded

This reads `stories260K.bin` (the legacy checkpoint of llama2.c: 7 int32, then float32 tensors) and `tok512.bin` (score,
length and bytes of each token), and writes `target/` and `draft/` into the output directory. Each directory is written
whole or not at all, and the same input always gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from draftproof.errors import UserError
from draftproof.files import whole_directory
from draftproof.models.layers import truncated_copy

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
SPECIAL = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": UNK}
SPACE = "▁"
DRAFT_LAYERS = range(4)


class Header(NamedTuple):
    """The first 7 integers of a legacy checkpoint; a positive vocabulary means that the head is the embedding."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int


def read_checkpoint(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """The header, and the tensors with the names that transformers uses.

    Raises:
        UserError: the length of the file does not fit its header, or the head is not tied to the embedding.
    """
    raw = path.read_bytes()
    header = Header(*struct.unpack("<7i", raw[:28]))
    floats = torch.frombuffer(bytearray(raw[28:]), dtype=torch.float32)
    shapes = _shapes(header)
    head_dim = header.dim // header.heads
    rope_tables = header.context * head_dim  # at the end of the file; every loader computes them again
    expected = sum(torch.Size(shape).numel() for _, shape in shapes) + rope_tables
    if header.vocab <= 0 or len(floats) != expected:
        raise UserError(f"{path} has {len(floats)} floats: its header {header} needs {expected}, and a tied head")
    return header, _named(floats, shapes, header)


def _shapes(h: Header) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors in file order; `{}` is the layer, which is the first dimension."""
    kv = h.dim // h.heads * h.kv_heads
    return [
        ("model.embed_tokens.weight", (h.vocab, h.dim)),
        ("model.layers.{}.input_layernorm.weight", (h.layers, h.dim)),
        ("model.layers.{}.self_attn.q_proj.weight", (h.layers, h.dim, h.dim)),
        ("model.layers.{}.self_attn.k_proj.weight", (h.layers, kv, h.dim)),
        ("model.layers.{}.self_attn.v_proj.weight", (h.layers, kv, h.dim)),
        ("model.layers.{}.self_attn.o_proj.weight", (h.layers, h.dim, h.dim)),
        ("model.layers.{}.post_attention_layernorm.weight", (h.layers, h.dim)),
        ("model.layers.{}.mlp.gate_proj.weight", (h.layers, h.hidden, h.dim)),
        ("model.layers.{}.mlp.down_proj.weight", (h.layers, h.dim, h.hidden)),
        ("model.layers.{}.mlp.up_proj.weight", (h.layers, h.hidden, h.dim)),
        ("model.norm.weight", (h.dim,)),
    ]


def _named(floats: Tensor, shapes: list[tuple[str, tuple[int, ...]]], header: Header) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    start = 0
    for name, shape in shapes:
        size = torch.Size(shape).numel()
        block = floats[start : start + size].view(shape)
        start += size
        slices = {name.format(i): part for i, part in enumerate(block)} if "{}" in name else {name: block}
        named |= {key: _halves(part, key, header).clone() for key, part in slices.items()}
    return named


def _halves(weight: Tensor, name: str, header: Header) -> Tensor:
    """Reorder query and key rows: llama2.c rotates (2i, 2i+1), transformers rotates (i, i + half the head)."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    head_dim = header.dim // header.heads
    return weight.view(-1, head_dim // 2, 2, header.dim).transpose(1, 2).reshape(weight.shape)


def read_vocabulary(path: Path, size: int) -> list[tuple[str, float]]:
    """Piece and score of each id; the file has spaces for sentencepiece's `▁`, and newlines around control pieces."""
    raw = path.read_bytes()
    pieces, at = [], 4
    for _ in range(size):
        score, length = struct.unpack("<fi", raw[at : at + 8])
        at += 8 + length
        pieces.append((raw[at - length : at].decode("utf-8").strip("\n").replace(" ", SPACE), score))
    return pieces


def build_tokenizer(pieces: list[tuple[str, float]]) -> Tokenizer:
    """A BPE tokenizer with byte fallback; merges are in the order of the scores, like the encoder of llama2.c."""
    vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, _merges(pieces), unk_token=UNK, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", [(BOS, vocab[BOS])])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (UNK, BOS, EOS)])
    return tokenizer


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third one, best score first."""
    vocab = {piece for piece, _ in pieces}
    by_score = sorted((piece for piece, _ in pieces), key=dict(pieces).__getitem__, reverse=True)
    splits = ((piece[:cut], piece[cut:]) for piece in by_score for cut in range(1, len(piece)))
    return [(left, right) for left, right in splits if left in vocab and right in vocab]


def model_config(header: Header) -> dict[str, Any]:
    """The config for `LlamaForCausalLM`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": [1, 2],  # this model ends a story with <s>, which begins the next one; </s> was never trained
        "head_dim": header.dim // header.heads,
        "hidden_act": "silu",
        "hidden_size": header.dim,
        "intermediate_size": header.hidden,
        "max_position_embeddings": header.context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": header.heads,
        "num_hidden_layers": header.layers,
        "num_key_value_heads": header.kv_heads,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": header.vocab,
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """The config of the tokenizer, with the generic fast class, so that tokenizer.json is used unchanged."""
    return {
        **SPECIAL,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` indented, in UTF-8, with a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_target(source: Path, out: Path) -> None:
    """Write the whole model of `source` into the new directory `out`."""
    header, tensors = read_checkpoint(source / "stories260K.bin")
    tokenizer = build_tokenizer(read_vocabulary(source / "tok512.bin", header.vocab))
    with whole_directory(out) as work:
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(work / "tokenizer.json"))
        write_json(work / "config.json", model_config(header))
        write_json(work / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": 2})
        write_json(work / "tokenizer_config.json", tokenizer_config(header.context))
        write_json(work / "special_tokens_map.json", SPECIAL)


def main() -> int:
    """Convert the first directory into `target/` and `draft/` in the second one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="directory with stories260K.bin and tok512.bin")
    parser.add_argument("out", type=Path, help="directory that receives target/ and draft/; neither may exist")
    options = parser.parse_args()
    try:
        write_target(options.source, options.out / "target")
        truncated_copy(options.out / "target", DRAFT_LAYERS, options.out / "draft")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
