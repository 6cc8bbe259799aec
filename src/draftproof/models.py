"""Models by name: what can be fetched, where it is kept, and how to cut a shallower draft out of a model.

Knows: names, files, checksums, the layout of a Llama-shaped directory.
Does not know: engines, drafters, how a model runs.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from safetensors.torch import load_file, save_file

from draftproof.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Give a temporary sibling of `out` to fill; it becomes `out` if the block ends well and vanishes if not.

    Raises:
        UserError: `out` is there already.
    """
    _refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.{uuid4().hex}"
    work.mkdir()
    try:
        yield work
        _refuse_existing(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already: name a path that does not, or remove it first")


def truncated_copy(source_dir: str | Path, keep_layers: Sequence[int], out_dir: str | Path) -> Path:
    """Write the model of `source_dir` with only the decoder layers `keep_layers`, renumbered from 0; returns `out_dir`.

    Works on the files of Llama-shaped directories (`model.layers.N.*` tensors in safetensors); embedding, final norm,
    head and tokenizer are the source's, so both models speak the same tokens.

    Raises:
        UserError: a layer that is not there or not ascending, a directory of another shape, or `out_dir` exists.
    """
    source, out = Path(source_dir), Path(out_dir)
    config = _read_config(source)
    _check_layers(keep_layers, int(config.get("num_hidden_layers", 0)))
    tensors = _kept(_read_tensors(source), keep_layers)
    with whole_directory(out) as work:
        _copy_companions(source, work)
        _write_json(work / "config.json", _truncated_config(config, keep_layers))
        save_file(tensors, work / _WEIGHTS, metadata={"format": "pt"})
    return out


def _read_config(source: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{source} holds no config.json to read ({error}): name a Hugging Face directory") from error
    return config


def _check_layers(keep: Sequence[int], depth: int) -> None:
    if not keep or any(b <= a for a, b in itertools.pairwise(keep)):
        raise UserError(f"keep_layers is {list(keep)}: name at least one layer, in ascending order, each once")
    if keep[0] < 0 or keep[-1] >= depth:
        raise UserError(f"keep_layers is {list(keep)}: the source has {depth} layers, legal are 0 to {depth - 1}")


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
    """Copy the tokenizer, the chat template and the generation config: all text files but the config and the index."""
    for path in sorted(source.iterdir()):
        if path.suffix in {".json", ".jinja", ".txt", ".model"} and path.name not in {"config.json", _INDEX}:
            shutil.copyfile(path, out / path.name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
