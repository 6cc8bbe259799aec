"""The files of a published head: a directory or a hub id with a config and safetensors; and the refusals they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftproof import models
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.fit import MadeFor, refuse_unfit
from draftproof.errors import UserError, listed, reason
from draftproof.files import read_object
from draftproof.models.found import is_file_name, weight_files

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ALGORITHM = "speculators_model_type"
# Drafters that read published heads.
DRAFTERS = ("eagle3", "peagle", "dflash", "dspark", "dflash2", "eagle", "medusa", "mtp", "assistant")
_NESTS = ("dflash_config", "dspark_config")
_PATTERNS = [CONFIG, "*.safetensors", INDEX]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONVERT = (
    "where you trust its source, convert it once: torch.load(FILE, weights_only=True), then "
    f"safetensors.torch.save_file to {WEIGHTS} beside its {CONFIG}"
)


@dataclass(frozen=True, eq=False)
class HeadFiles:
    """What the files of a head hold."""

    source: str
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    noun: str = "head"

    def refused(self, why: str) -> UserError:
        """An error that names the head."""
        return UserError(f"the {self.noun} {self.source!r} {why}")

    def made(self, family: Any, families: Sequence[str], fields: Mapping[str, Any]) -> Any:
        """Transformers' config of layers of one of these families."""
        from transformers import AutoConfig

        if family not in families:
            raise self.refused(f"has layers of type {family!r}: expected {' and '.join(families)}")
        try:
            return AutoConfig.for_model(family, **{key: each for key, each in fields.items() if key != "model_type"})
        except Exception as cause:
            raise UserError(f"the config of the {self.noun} {self.source!r} cannot be used: {reason(cause)}") from cause

    @property
    def layer(self) -> Mapping[str, Any]:
        """The config of its transformer layers; that of the head itself in layouts that do not nest it."""
        nested = self.config.get("transformer_layer_config")
        return nested if isinstance(nested, Mapping) else self.config

    @property
    def nest(self) -> str:
        """The name under which authors of block heads nest fields of their own."""
        return next((name for name in _NESTS if isinstance(self.config.get(name), Mapping)), _NESTS[0])

    @property
    def nested(self) -> Mapping[str, Any]:
        """The fields there."""
        return self.config.get(self.nest) or {}

    def field(self, name: str, default: Any = None) -> Any:
        """A field of the config, wherever it stands."""
        return self.nested.get(name, self.config.get(name, default))

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of the config."""
        found = self.field(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UserError(f"the config of the head {self.source!r} has {name} {found!r}: expected 1 or more")
        return found

    def factor(self, name: str) -> float | None:
        """A factor that the config may name, above 0; None where it names none."""
        found = self.field(name)
        if found is None or found is False:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            raise UserError(f"the config of the head {self.source!r} has {name} {found!r}: expected a number above 0")
        return float(found)

    def take(self, name: str, shape: Sequence[int | None] = ()) -> Tensor:
        """A tensor, which is then used."""
        if name not in self.tensors:
            raise UserError(
                f"the weights of the head {self.source!r} have no {name}, which its config asks for "
                f"(there are {_some(self.tensors)})"
            )
        found = self.tensors.pop(name)
        if shape and (len(shape) != found.ndim or any(s not in (None, n) for s, n in zip(shape, found.shape))):  # noqa: B905
            raise UserError(
                f"the weights of the head {self.source!r} do not fit its config: {name} has shape "
                f"{list(found.shape)}, expected is {['any' if size is None else size for size in shape]}"
            )
        return found

    def optional(self, name: str, shape: Sequence[int | None] = ()) -> Tensor | None:
        """A tensor, which is then used; None where it is missing."""
        return self.take(name, shape) if name in self.tensors else None

    def ignore(self, *names: str) -> None:
        """Drop tensors that other engines use."""
        for name in names:
            self.tensors.pop(name, None)

    def refuse_left(self) -> None:
        """Refuse tensors that nothing used: then the head has parts that would be left out."""
        left = [name for name in self.tensors if not name.endswith(("rotary_emb.inv_freq", "num_batches_tracked"))]
        if left:
            raise self.refused(
                f"has weights that its layout does not name here: {_some(left)}; so its "
                "structure is another one, and drafting without them would be wrong"
            )


def read_head(source: str, algorithm: str, *, weights: Sequence[str] = (WEIGHTS,)) -> HeadFiles:
    """Read a head's config and tensors.

    Args:
        source: a directory, or a hub id, which is fetched as huggingface_hub does.
        algorithm: the drafter that asks.
        weights: names of the file of weights, where it is one file.

    Raises:
        UserError: no such head, a file that is missing or damaged, pickled weights only, or another algorithm.
    """
    folder = _folder(source)
    config = _config(source, folder)
    try:
        tensors: dict[str, Tensor] = {}
        for path in _weight_files(source, folder, weights):
            tensors |= load_file(path)
    except UserError:
        raise
    except Exception as cause:
        raise UserError(f"the weights of the head {source!r} cannot be read: {reason(cause)}") from cause
    _refuse_other_algorithm(source, algorithm_of(config), algorithm)
    return HeadFiles(source, config, tensors, "assistant" if algorithm == "assistant" else "head")


def _folder(source: str) -> Path:
    where = Path(models.resolve(source)).expanduser()
    if where.is_dir():
        return where
    if where.exists():
        raise UserError(f"{source!r} is a file: expected the directory or the hub id of a head, with its {CONFIG}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_PATTERNS))
    except Exception as cause:
        raise UserError(
            f"no head {source!r} here, and the hub gave none ({reason(cause)}): expected a directory with a {CONFIG} "
            "and safetensors, and a hub id (with a network and without --offline, or in huggingface_hub's cache)"
        ) from cause


def _config(source: str, folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"no head in {source!r}: {CONFIG} is missing (expected a directory or hub id of a head)")
    return read_object(path, "the config of a head")


def _weight_files(source: str, folder: Path, names: Sequence[str]) -> list[Path]:
    if (folder / INDEX).is_file():
        named = weight_files(folder)
        absent = [path.name for path in named if not path.is_file()]
        if absent:
            raise UserError(f"the head {source!r} is not whole: its {INDEX} names {absent[0]}, which is missing")
        return named
    for name in names:
        if (folder / name).is_file():
            return [folder / name]
    pickled = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickled:
        raise UserError(
            f"the head {source!r} has pickled weights only ({pickled[0]}): they are refused on purpose, since reading "
            f"a pickle can run any code; {_CONVERT}"
        )
    raise UserError(
        f"no weights in the head {source!r}: expected {' or '.join(names)}; heads that are published as pickles "
        f"(.bin, .pt) only are refused on purpose: {_CONVERT}"
    )


def head_algorithm(source: str) -> str | None:
    """The drafter that reads a published head, where a directory or hub id is one by its config or weights; else None.

    Names of models that this package knows, and those of files, are never heads.
    """
    where = Path(source).expanduser() / CONFIG
    if source in models.REGISTRY or is_file_name(source):
        return None
    if not where.parent.exists() and "/" in source and not models.is_unreachable(source):
        from huggingface_hub import hf_hub_download

        try:
            where = Path(hf_hub_download(source, CONFIG))
        except (OSError, ValueError):  # loading says why the model cannot be had
            return None
    if not where.is_file():
        return None
    config = _config(source, where.parent)
    found = _named_algorithm(config)
    if found is None and config.get("num_hidden_layers") == 1 and _is_first_eagle(source):
        return "eagle"
    if found is not None and found not in DRAFTERS:
        _refuse_other_algorithm(source, found, "")
    return found


def _is_first_eagle(source: str) -> bool:
    """Whether something with the config of a model of one layer is a head of the first EAGLE papers.

    Their product over a token and a state is in no model. Weights that are pickled are taken for such a head where no
    tokenizer is beside them: reading them says why they are refused.
    """
    try:
        folder = _folder(source)
    except UserError:  # loading says why the model cannot be had
        return False
    if not (folder / WEIGHTS).is_file():
        on_hub = not Path(source).expanduser().exists()  # of which no other files are fetched
        pickled = on_hub or any(any(folder.glob(pattern)) for pattern in _PICKLES)
        return pickled and not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "tokenizer*"))
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return "fc.weight" in file.keys()  # noqa: SIM118 - not a mapping
    except Exception:  # noqa: BLE001 - reading the file as a model's or as a head's says what is wrong
        return False


def algorithm_of(config: Mapping[str, Any]) -> str:
    """Which drafter reads a head with this config, or the name that the config gives its algorithm."""
    return _named_algorithm(config) or "eagle"


def _named_algorithm(config: Mapping[str, Any]) -> str | None:
    """The same where the config tells a head from a model, which those of the first EAGLE heads do not."""
    named = config.get(ALGORITHM)
    if isinstance(named, str) and named:
        return named
    if config.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant"):
        return "assistant"
    if "medusa_num_heads" in config:
        return "medusa"
    kinds = " ".join(map(str, config.get("architectures") or [])).lower()
    if "dspark_config" in config or "dspark" in kinds:
        return "dspark"
    if "dflash_config" in config or "dflash" in kinds:
        return "dflash2" if "dflash2" in kinds else "dflash"
    return "eagle3" if "eagle3" in kinds or "draft_vocab_size" in config else None


def _refuse_other_algorithm(source: str, found: str, wanted: str) -> None:
    """Name the algorithm of a head that another drafter reads, or none."""
    if found == wanted:
        return
    if found in DRAFTERS:
        raise UserError(f"the head {source!r} is of algorithm {found}: use drafter {found}:{source}")
    raise UserError(
        f"the head {source!r} has {ALGORITHM} {found!r}, which is not read here: expected {', '.join(DRAFTERS)}"
    )


def refuse_other_target(files: HeadFiles, target: SlotBackend, *, hidden: int | None, vocab: int | None) -> None:
    """Refuse a head that does not fit a target (`fit`); `hidden` and `vocab` are None where the head names none."""
    layers = files.config.get("num_target_layers")
    named = _verifier(files.config).get("architectures") or ()
    made_for = MadeFor(verifier_of(files.config), hidden, vocab, layers if isinstance(layers, int) else None, named)
    refuse_unfit(f"the {files.noun} {files.source!r}", made_for, target)


def _verifier(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (config.get("speculators_config") or {}).get("verifier")
    return found if isinstance(found, Mapping) else {}


def verifier_of(config: Mapping[str, Any]) -> str | None:
    """The name of the target in a head's config, where it says one."""
    return _verifier(config).get("name_or_path") or config.get("base_model_name_or_path")


def _some(names: Sequence[str] | Mapping[str, Any]) -> str:
    return listed(sorted(names), 4) or "none"


def cast(tensor: Tensor, like: SlotBackend) -> Tensor:
    """A tensor in the target's dtype and on its device; integers and masks keep their dtype."""
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)


def drafted_ids(files: HeadFiles, size: int, vocab: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The tokens that a head drafts, ascending, and the order of its rows for that; None for all, and None as they are.

    Token i of the head is token i + d2t[i] of the target, and the mask t2d names the same tokens.

    Raises:
        UserError: no map, or one that names tokens twice, outside of the vocabulary, or other ones than the mask.
    """
    offsets, mask = files.optional("d2t", [size]), files.optional("t2d", [vocab])
    if offsets is None:
        if size == vocab:
            return None, None
        raise files.refused(f"drafts {size} of {vocab} tokens, and has no map d2t that says which they are")
    ids = offsets.long() + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) < size:
        raise UserError(f"the map d2t of the head {files.source!r} names tokens twice or outside of 0 to {vocab - 1}")
    if mask is not None and not torch.equal(mask.bool().nonzero().squeeze(-1), ids.sort().values):
        raise UserError(f"the maps d2t and t2d of the head {files.source!r} name different tokens")
    if size == vocab and torch.equal(ids, torch.arange(vocab)):
        return None, None
    found = ids.sort()
    return found.values.to(device), None if torch.equal(found.values, ids) else found.indices.to(device)


def mask_token_of(files: HeadFiles, found: Any, target: SlotBackend) -> int:
    """The token of masked places."""
    if not isinstance(found, int) or not 0 <= found < target.vocab_size:
        raise files.refused(
            f"has mask_token_id {found!r}: expected 0 to {target.vocab_size - 1}, a token of {target.name}"
        )
    return found


def places_of(files: HeadFiles) -> int:
    """How many tokens a head drafts: as its config proposes, else 8."""
    methods = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found = methods[0].get("speculative_tokens", 8)
    if not isinstance(found, int) or not 1 <= found <= 64:
        raise files.refused(f"proposes {found!r} tokens: expected 1 to 64")
    return found
