"""Models by name: weights loaded, and the forward pass that reads them chosen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftproof import models
from draftproof.backends.hf import tensor_parallel as parallel
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.generate import PlainBackend
from draftproof.backends.lean.backend import LeanBackend, supports
from draftproof.backends.lean.graph_backend import GraphBackend
from draftproof.backends.lean.module_backend import LeanModulesBackend, packing, why_unread
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.loading.adapters import base_of, with_adapter
from draftproof.backends.loading.language_model import reading_classes, text_part
from draftproof.backends.loading.options import LoadOptions, parse_device, parse_dtype
from draftproof.backends.loading.packed_layers import PackedLayers
from draftproof.backends.loading.quantization import packages_hint, quantization_for, refuse_unknown_quantization
from draftproof.backends.loading.stored_backends import stored_backend
from draftproof.backends.recurrent.mixers import mixers_of
from draftproof.errors import UndraftableError, UserError, listed, reason, refuse_unknown
from draftproof.models.download import INSTALL_GGUF
from draftproof.models.gguf_file import GGUFFile, generation_config, is_gguf
from draftproof.native.threads import limit_threads

BACKENDS = {
    "auto": "lean where the model has a lean forward (on CUDA: graphs), snapshot where it has recurrent layers, "
    "else hf",
    "hf": "transformers' own forward pass",
    "snapshot": "for models with recurrent layers (linear attention, convolutions, state spaces): their states are "
    "kept at the last committed token, since no token can be taken out; a forward pass of ours or transformers' own",
    "lean": "ours, for dense decoders: Llama, Mistral, Qwen2, Qwen3, Gemma 3 and 4, Phi-3 and others "
    "(docs/guide/models.md)",
    "generate": "transformers' own generation step by step, without drafts; auto takes it for targets that cannot be "
    "drafted for",
    "graphs": "lean on CUDA, its passes recorded as CUDA graphs",
}

LEAN_KINDS = (LeanBackend.kind, GraphBackend.kind)  # a lean forward takes its model apart
ATTENTION = ("eager", "sdpa")  # those that take the masks of trees and ragged batches
Loaded = HFBackend | LeanBackend | PlainBackend
_BACKENDS: dict[str, Any] = {
    each.kind: each for each in (HFBackend, LeanSnapshotBackend, LeanBackend, PlainBackend, GraphBackend)
}
_RENAMED = {"plain": "generate", "compiled": "graphs"}  # names of the version before, which still work, with a warning
_log = logging.getLogger(__name__)


def current_name(backend: str) -> str:
    """The name of a backend today; an older name is taken for one version, with a warning."""
    name = _RENAMED.get(backend, backend)
    if name != backend:
        _log.warning("backend %s is now called %s: the old name will be removed in the next version", backend, name)
    return name


def load_backend(source: str, options: LoadOptions | None = None) -> Loaded:
    """A backend from a registered name, a hub id, a directory or a .gguf file.

    Weights that `options` asks to be rounded are not yet. With `tensor_parallel`, only process 0 returns (see
    `take_part`).

    Raises:
        UserError: not found, broken, unable to roll back, or a backend that is none or does not support the model.
    """
    options = options or LoadOptions()
    backend = current_name(options.backend)
    refuse_unknown("backend", backend, BACKENDS)
    if options.tensor_parallel != 1:
        _refuse_undivided(source, replace(options, backend=backend))
        return take_part(options.tensor_parallel).load(source, options, _load_part)
    where = models.resolve(source)
    model = load_model(where, options)
    kind = suitable(model) if backend == "auto" else backend
    if options.attn_implementation is not None and kind in LEAN_KINDS:
        raise UserError(
            f"attn_implementation is {options.attn_implementation!r}, and {source} is read by backend {kind}, which "
            "has its own attention: leave it out, or name backend hf"
        )
    try:
        made = _backend(kind, model, source, options)
    except UserError as cause:
        if backend != "auto" or (kind not in LEAN_KINDS and not isinstance(cause, UndraftableError)):
            raise
        because = cause
    else:
        return made
    if kind in LEAN_KINDS:  # its parts are known, but not what it makes of them; the model was taken apart
        _log.warning("read by transformers' own forward pass: %s", because)
        del model  # before there are two
        model = load_model(where, options)
        try:
            return HFBackend(model, name=source, check=options.check)
        except UndraftableError as cause:
            because = cause
    if not options.plainly:
        raise because
    return _plainly(model, source, because, check=options.check)


def _backend(kind: str, model: Any, source: str, options: LoadOptions) -> Loaded:
    packed, snapshot = isinstance(options.quantization_config, PackedLayers), kind == LeanSnapshotBackend.kind
    by_modules = kind == LeanModulesBackend.kind and reads_modules(model)
    if packed and (snapshot or by_modules or kind == HFBackend.kind):
        return stored_backend(model, source, snapshot=snapshot, check=options.check)
    cls = LeanModulesBackend if by_modules else _BACKENDS[kind]
    made: Loaded = cls(model, name=source, check=options.check, **packing(cls))
    return made


def take_part(processes: int) -> parallel.ProcessGroup:
    """Join the processes among which models are divided; only process 0 returns.

    The others follow it until it ends, and exit then.
    """
    group = parallel.join(processes)
    if not group.leads:
        group.follow(_load_part)
        raise SystemExit
    return group


def _refuse_undivided(source: str, options: LoadOptions) -> None:
    """Refuse what cannot be divided among processes, before anything is sent to them."""
    what = f"tensor_parallel is {options.tensor_parallel}"
    if options.backend not in ("auto", HFBackend.kind):
        raise UserError(
            f"{what}, and backend is {options.backend!r}: only transformers' own forward pass is divided among "
            f"processes: use --backend {HFBackend.kind} (or auto, which takes it)"
        )
    for name in ("device", "adapter", "quantization_config"):
        if (given := getattr(options, name)) is not None:
            raise UserError(f"{what}, which does not go with {name} {given!r}: leave one of them out")
    where = Path(models.resolve(source))
    if is_gguf(where) or base_of(str(where)) is not None:
        raise UserError(
            f"{what}, and {source!r} is {'a GGUF file' if where.suffix else 'an adapter'}: only checkpoints in "
            "safetensors are divided among processes"
        )
    _refuse_what_cannot_be_read(where)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(where))
    except Exception as cause:
        raise UserError(
            f"cannot read the config of {source!r}: {reason(cause)} (expected a hub id or a directory)"
        ) from cause
    parallel.refuse_indivisible(config, options.tensor_parallel, source)


def _load_part(source: str, options: LoadOptions) -> Any:
    """Load this process's part of a model."""
    model = load_model(models.resolve(source), options)
    if mixers_of(model):
        raise UserError(
            f"{source} has layers with a recurrent state, which are not divided among processes: use tensor_parallel 1"
        )
    return model


def _plainly(model: Any, source: str, cause: UserError, *, check: bool) -> PlainBackend:
    """The backend of last resort; where that does not work either, the first reason stands."""
    try:
        made = PlainBackend(model, name=source, check=check, because=str(cause))
    except UserError as other:
        raise UserError(f"{cause}; nor can it be decoded plainly: {reason(other)}") from cause
    _log.warning("decoded plainly, without drafts: %s", cause)
    return made


def suitable(model: Any) -> str:
    """The backend that `auto` takes for a loaded model."""
    if supports(model) is None:
        return GraphBackend.kind if model.device.type == "cuda" else LeanBackend.kind
    if mixers_of(model):
        return "snapshot"
    return LeanModulesBackend.kind if why_unread(model) is None else "hf"


def reads_modules(model: Any) -> bool:
    """Whether backend lean reads a model by its modules, and does not take it apart."""
    return supports(model) is not None and not mixers_of(model) and why_unread(model) is None


def load_model(source: str, options: LoadOptions | None = None) -> Any:
    """Load a causal LM from a hub id, a directory or a .gguf file; safetensors or GGUF only, never a pickle.

    Of a multi-modal model the text part, or the whole model where that is not one of its own. An adapter is loaded with
    its base model.

    Raises:
        UserError: nothing to load there, in one line.
    """
    limit_threads()
    options = options or LoadOptions()
    attention, config, adapter = options.attn_implementation, options.quantization_config, options.adapter
    if attention not in (None, *ATTENTION):
        raise UserError(f"attn_implementation: expected one of {', '.join(ATTENTION)}, got {attention!r}")
    given: dict[str, Any] = {"dtype": parse_dtype(options.dtype), "trust_remote_code": options.trust_remote_code}
    if attention is not None:
        given["attn_implementation"] = attention
    given |= _placed(options.device) if options.tensor_parallel == 1 else _divided(options.tensor_parallel)
    if config is not None:
        given |= {"quantization_config": config, **_kept_where_quantized(given)}
    base = base_of(source)
    if base is not None and adapter is not None:
        raise UserError(f"{source!r} is itself an adapter, and another one is named ({adapter!r}): name one of them")
    whole = partial(_load_whole, base or source, given)
    named = adapter if base is None else source
    if named is not None:
        return with_adapter(whole, named)
    return text_part(whole()) if "device" in given else whole()


def refuse_gguf(name: str, what: str, hint: str = "") -> None:
    """Refuse a GGUF file where a torch module is needed: it would have other numbers than the model that is served.

    `hint` says what else leads to the aim.
    """
    if is_gguf(Path(models.resolve(name))):
        raise UserError(
            f"{what} needs a model with full weights, and {name} is a GGUF file, which is read in its own few bits: "
            f"expected the model's own directory or hub id{hint}"
        )


def _kept_where_quantized(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that read weights right onto an accelerator, where methods of quantization have their kernels."""
    device = options.get("device")
    return {} if device is None or device.type == "cpu" else {"device_map": {"": str(device)}}


def _load_whole(source: str, options: dict[str, Any]) -> Any:
    device = options.get("device")
    options = {name: value for name, value in options.items() if name != "device"}
    where = Path(source)
    if is_gguf(where):
        if "quantization_config" in options:
            raise UserError(
                f"quantization_config does not go with {str(where)!r}: weights of a .gguf file are quantized already, "
                "and full weights are made of them; leave it out"
            )
        source, options = str(where.parent), {**options, **_gguf_options(where)}
    else:
        _refuse_what_cannot_be_read(where)
        options = {**options, "use_safetensors": True}
        given = options.get("quantization_config")
        if isinstance(given, PackedLayers):
            options |= given.options
        elif given is not None:
            options["quantization_config"] = quantization_for(source, given)
    kinds = reading_classes(source, gguf=options.get("gguf_file"), trust_remote_code=options["trust_remote_code"])
    model: Any = None
    for kind in kinds:
        try:
            model = _load_as(kind, source, str(where), options)
            break
        except UserError:
            if kind is kinds[-1]:
                raise
    if is_gguf(where):
        for name, value in generation_config(GGUFFile(where)).items():
            setattr(model.generation_config, name, value)
    return model if device is None else model.to(device=device)


def _load_as(kind: Any, source: str, where: str, options: dict[str, Any]) -> Any:
    """Load a model by one of transformers' auto classes, and check that nothing is missing."""
    asked = options.get("quantization_config")
    try:
        with redirect_stdout(sys.stderr):  # gptqmodel logs to stdout, where the caller's own output goes
            # a copy, since transformers writes into a quantization config
            model, report = kind.from_pretrained(source, output_loading_info=True, **deepcopy(options))
    except Exception as cause:
        raise UserError(
            f"cannot load a model from {where!r}: {reason(cause)}{_hint(cause, source, asked)} "
            "(expected a hub id, a directory or a .gguf file)"
        ) from cause
    _refuse_missing(where, model, report)
    refuse_unknown_quantization(where, model)
    _refuse_split_tie(where, model)
    return model


def _placed(device: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Options that put a model onto a device, or spread it over several."""
    if device is None or (isinstance(device, str) and device != "auto"):
        return {"device": parse_device(device)}
    if find_spec("accelerate") is None:
        raise UserError(
            f"device {device!r} spreads a model, which needs the package accelerate: pip install accelerate"
        )
    return {"device_map": device if isinstance(device, str) else dict(device)}


def _divided(processes: int) -> dict[str, Any]:
    """Options that load a process's part of a model, by transformers' own plan for its type."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=processes)}


def _refuse_what_cannot_be_read(where: Path) -> None:
    """Refuse directories whose files say by their names that they cannot be read here."""
    if not where.is_dir():
        return
    if (where / "adapter_config.json").exists() and find_spec("peft") is None:
        raise UserError(
            f"{str(where)!r} holds a LoRA adapter, not a whole model: install peft (pip install peft), which loads it "
            "with its base model, or merge it into its base model and save that"
        )
    names = {path.name for path in where.iterdir()}
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")) and "arg" not in name)
    if pickled and not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        raise UserError(
            f"{str(where)!r} holds pickled weights only ({pickled[0]}): they are refused on purpose, since reading a "
            "pickle can run any code. Where you trust its source, load it with transformers and write it again with "
            "save_pretrained(..., safe_serialization=True)"
        )


def _hint(cause: Exception, source: str, asked: Any) -> str:
    said = str(cause)
    if needed := packages_hint(source, asked):
        return needed
    if "safetensors" in said and ("no file named" in said or "does not appear to have" in said):
        return "; pickled weights (.bin) are refused on purpose, since reading a pickle can run any code"
    if "GGUF model with architecture" in said:
        return " Take the model's own directory or hub id"
    if "is on the meta device" in said:
        return "; an output layer that is tied to the embedding must be in the same place as that"
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        return f": pip install {cause.name}"
    return ""


def _refuse_missing(source: str, model: Any, report: Any) -> None:
    """Refuse a checkpoint that leaves tensors of the model at their random beginning."""
    found = dict(report) if isinstance(report, dict) else vars(report)
    missing = sorted(str(name) for name in found.get("missing_keys") or ())
    other = [str(each[0] if isinstance(each, tuple | list) else each) for each in found.get("mismatched_keys") or ()]
    if missing or other:
        kind = "lacks" if missing else "has in other shapes"
        raise UserError(
            f"the checkpoint {source!r} {kind} {len(missing + other)} tensors of {type(model).__name__}: "
            f"{listed(missing + other, 5)}. The model would compute with random numbers there: download it again, or "
            "save it with all its weights"
        )


def _refuse_split_tie(source: str, model: Any) -> None:
    """Refuse an output layer that is tied to the embedding, where only one of both is on the disk."""
    places = getattr(model, "hf_device_map", None)
    parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    if not places or None in parts or not model.config.get_text_config().tie_word_embeddings:
        return
    names = [next(name for name, module in model.named_modules() if module is part) for part in parts]
    found = [_place_of(name, places) for name in names]
    if found.count("disk") == 1:
        shown = " and ".join(f"{name} on {place}" for name, place in zip(names, found, strict=True))
        raise UserError(
            f"the output layer of {source!r} is tied to its embedding, and the device map puts them in two places "
            f"({shown}): put both in the same one"
        )


def _place_of(name: str, places: Mapping[str, Any]) -> str:
    """Where a device map puts a module: the entry of the longest name that contains it."""
    fitting = [key for key in places if key in ("", name) or name.startswith(f"{key}.")]
    return str(places[max(fitting, key=len)]) if fitting else ""


def _gguf_options(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"expected the path of an existing .gguf file, got {str(path)!r}")
    if find_spec("gguf") is None:
        raise UserError(f"reading .gguf files needs the package gguf: install it with: {INSTALL_GGUF}")
    from transformers import GgufConfig

    return {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
