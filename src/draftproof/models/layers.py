"""A shallower copy of a Llama-shaped model: some decoder layers of its files, renumbered."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof import files
from draftproof.errors import UserError

PROVENANCE = "provenance.json"  # in the directory of a model made here: where its weights come from
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def truncated_copy(source_dir: str | Path, keep_layers: Sequence[int], out_dir: str | Path) -> Path:
    """Write the model of `source_dir` with only the decoder layers `keep_layers`, renumbered from 0; returns `out_dir`.

    Works on the files of Llama-shaped directories (`model.layers.N.*` tensors in safetensors); embedding, final norm,
    head and tokenizer are the source's, so both models have the same tokens.
    """
    out = Path(out_dir)
    with files.whole_directory(out) as work:
        write_truncated(Path(source_dir), keep_layers, work)
    return out


def parse_layers(text: str) -> list[int]:
    """The layers that ranges such as `0-11,18-29` or `0,2,4` name, both ends included."""
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if match is None:
            raise UserError(f"expected ranges of layers such as 0-11,18-29, got {part!r} in {text!r}")
        layers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return layers


def write_truncated(source: Path, keep: Sequence[int], out: Path) -> None:
    """Write the model of `source`, cut to the layers `keep`, into the empty directory `out`."""
    config = files.read_object(source / "config.json", "that of a Hugging Face directory")
    _check_layers(keep, int(config.get("num_hidden_layers", 0)))
    tensors = _kept(_read_tensors(source), keep)
    _copy_companions(source, out)
    files.write_json(out / "config.json", _truncated_config(config, keep))
    save_file(tensors, out / _WEIGHTS, metadata={"format": "pt"})


def _check_layers(keep: Sequence[int], depth: int) -> None:
    if not keep or any(b <= a for a, b in itertools.pairwise(keep)):
        raise UserError(f"keep_layers: expected one or more layers in ascending order, each once, got {list(keep)}")
    if keep[0] < 0 or keep[-1] >= depth:
        raise UserError(f"keep_layers: expected layers 0 to {depth - 1} (the source has {depth}), got {list(keep)}")


def _read_tensors(source: Path) -> dict[str, Tensor]:
    index = source / _INDEX
    shards = {_WEIGHTS}
    if index.exists():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = [name for name in sorted(shards) if not (source / name).exists()]
    if missing:
        raise UserError(f"{source} lacks {missing[0]}: only directories with safetensors weights can be cut")
    return {name: tensor for shard in sorted(shards) for name, tensor in load_file(source / shard).items()}


def _kept(tensors: dict[str, Tensor], keep: Sequence[int]) -> dict[str, Tensor]:
    """The tensors outside the layers, and those of the kept layers under their new numbers."""
    place = {old: new for new, old in enumerate(keep)}
    layer = {name: int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    missing = sorted(set(keep) - set(layer.values()))
    if missing:
        raise UserError(f"the weights lack model.layers.{missing[0]}: only Llama-shaped models can be cut")
    rename = {name: _LAYER.sub(f"model.layers.{place.get(number)}.", name) for name, number in layer.items()}
    return {rename.get(name, name): t for name, t in tensors.items() if layer.get(name, keep[0]) in place}


def _truncated_config(config: dict[str, Any], keep: Sequence[int]) -> dict[str, Any]:
    cut = config | {"num_hidden_layers": len(keep)}
    if isinstance(config.get("layer_types"), list):  # one entry a layer: full or sliding attention
        cut["layer_types"] = [config["layer_types"][number] for number in keep]
    return cut


def _copy_companions(source: Path, out: Path) -> None:
    """Copy the tokenizer, the chat template and the generation config: the files that hold for the cut model."""
    for path in sorted(source.iterdir()):
        untrue = path.name in {"config.json", _INDEX, PROVENANCE}
        if path.suffix in {".json", ".jinja", ".txt", ".model"} and not untrue:
            shutil.copyfile(path, out / path.name)
