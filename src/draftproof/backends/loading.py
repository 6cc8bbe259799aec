"""Models by name: weights loaded, and the forward pass that reads them chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftproof import models
from draftproof.backends.compiled import CompiledBackend
from draftproof.backends.hf import HFBackend
from draftproof.backends.lean import LeanBackend, supports
from draftproof.errors import UserError, reason

BACKENDS = {
    "auto": "lean where the model has a lean forward, else hf",
    "hf": "transformers' own forward pass",
    "lean": "ours, for the Llama family: Llama, Mistral, Qwen2, Qwen3",
    "compiled": "lean through torch.compile, which takes minutes in each process (docs/log.md says what it gains)",
}


def load_backend(
    source: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    backend: str = "auto",
) -> HFBackend:
    """A backend from a registered name, a hub id, a directory or a .gguf file.

    Raises:
        UserError: not found, broken, unable to roll back, or a backend that is none or does not support the model.
    """
    if backend not in BACKENDS:
        raise UserError(f"backend is {backend!r}: legal are {', '.join(BACKENDS)}")
    where = models.resolve(source)
    model = load_model(where, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if backend == "auto":
        backend = "lean" if supports(model) is None else "hf"
    made = {"hf": HFBackend, "lean": LeanBackend, "compiled": CompiledBackend}[backend]
    return made(model, name=source, check=check)


def load_model(source: str, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load a causal LM from a hub id, a directory or a .gguf file; safetensors or GGUF only, never a pickle.

    Args:
        source: hub id, local directory, or path of a .gguf file (needs the extra `gguf`).
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", "cuda:1"; default: an accelerator when there is one.
        trust_remote_code: run code that comes with the model.

    Raises:
        UserError: nothing to load there, in one line.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": parse_dtype(dtype), "trust_remote_code": trust_remote_code}
    where = Path(source)
    if where.suffix == ".gguf":
        source, options = str(where.parent), {**options, **_gguf_options(where)}
    elif where.is_dir() or not where.exists():
        options["use_safetensors"] = True
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    except Exception as cause:
        raise UserError(
            f"cannot load a model from {str(where)!r}: {reason(cause)} (legal: a hub id, a directory, a .gguf file)"
        ) from cause
    return model.to(device=parse_device(device))


def _gguf_options(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"no such file: {str(path)!r}; legal is the path of an existing .gguf file")
    try:
        import gguf  # noqa: F401
    except ImportError as cause:
        raise UserError("reading .gguf files needs the package gguf: pip install 'draftproof[gguf]'") from cause
    from transformers import GgufConfig

    return {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}


def parse_dtype(name: str) -> torch.dtype | str:
    """The torch dtype of a name; "auto" stays.

    Raises:
        UserError: unknown name.
    """
    legal = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in legal:
        raise UserError(f"dtype is {name!r}: legal are {', '.join(legal)}")
    return legal[name]  # type: ignore[return-value]


def parse_device(name: str | None) -> torch.device:
    """The torch device of a name; None picks an accelerator when there is one.

    Raises:
        UserError: not a device of this machine.
    """
    if name is None:
        return (
            torch.accelerator.current_accelerator() or torch.device("cpu")
            if torch.accelerator.is_available()
            else torch.device("cpu")
        )
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as cause:
        raise UserError(f"device {name!r} is not available here: {reason(cause)}") from cause
    return device
