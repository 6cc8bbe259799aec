"""Which models on this disk can draft for a target: shared tokens, and how much of its weights one reads."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof import models
from draftproof.backends.heads.published.mtp_qwen import FIRST
from draftproof.backends.heads.published.mtp_qwen import TYPES as PREDICTING
from draftproof.backends.loading.gguf_modules import predicts
from draftproof.backends.loading.load import LoadedModel, load
from draftproof.backends.loading.tokenization import share_of_text, shared_tokens
from draftproof.errors import UserError, reason
from draftproof.files import read_object
from draftproof.models.found import found_checkpoints, found_files, weight_files
from draftproof.models.gguf_file import GGUFFile, is_gguf
from draftproof.theory.lengths import iid_block_efficiency

VERIFIED = 1.11  # what a pass over five rows costs, of one that reads as much (docs/results/gguf.md, 1.5 B shapes)
_MOST_DRAFTED = 8
_LIKELY = 0.7  # accepted tokens of a drafted one, of small models of the same family
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Match:
    """A model that may draft for a target."""

    name: str  # that `--draft` takes
    nbytes: int  # that are read for a token
    share: float  # of the target's
    why_not: str  # why it cannot draft; empty where it can
    shared: float | None = None  # with another vocabulary, the share of the target's tokens in a text that it has, too
    # bytes that the target reads for 2, 3, ... rows, of those for one; empty where they are the same
    growth: tuple[float, ...] = ()

    def gain(self, accepted: float) -> tuple[float, int]:
        """Speed-up over plain decoding at the best length, and that length, by bytes alone.

        A drafted token costs `share`, a verification VERIFIED, and in a mixture of experts more, as its rows read more.

        Args:
            accepted: share of drafted tokens that are accepted after an accepted one.
        """
        lengths = range(1, _MOST_DRAFTED + 1)
        growth = self.growth or (1.0,) * _MOST_DRAFTED
        return max(
            (iid_block_efficiency(accepted, n) / (n * self.share + VERIFIED * growth[n - 1]), n) for n in lengths
        )


@dataclass(frozen=True)
class WeightReads:
    """Bytes of weights that a pass reads."""

    dense: int  # for every row
    experts: int = 0  # of all experts of all layers
    chosen: float = 1.0  # share of a layer's experts that a token chooses

    def of(self, rows: int) -> float:
        """For so many rows, whose tokens choose experts independently: neighbours share some, and read less."""
        return self.dense + self.experts * (1 - (1 - self.chosen) ** rows)

    @property
    def growth(self) -> tuple[float, ...]:
        """What it reads for 2, 3, ... rows, of that for one; empty where it is the same."""
        return tuple(self.of(rows) / self.of(1) for rows in range(2, _MOST_DRAFTED + 2)) if self.experts else ()


def find_draft(target: LoadedModel) -> str | None:
    """The name of the model on this disk that gains most as the target's draft model; None where none gains.

    Only models with the target's own vocabulary are taken. The gain is that of the bytes which both read.
    """
    fitting = [each for each in matches(target) if not each.why_not and each.shared is None]
    best = max(fitting, key=lambda each: each.gain(_LIKELY), default=None)
    if best is None or best.gain(_LIKELY)[0] <= 1:
        _log.warning("no model on this disk gains as a draft model of %s (draftproof models match)", target.name)
        return None
    _log.warning("the draft model of %s is %s, which reads %.2f of its bytes", target.name, best.name, best.share)
    return best.name


def matches(target: LoadedModel, folders: Collection[Path] = ()) -> list[Match]:
    """What can draft for a target, the smallest first; then those with another vocabulary, then what cannot.

    Args:
        target: whose tokenizer is compared; its weights are not read.
        folders: that are searched for .gguf files and directories of models, beside what `found_files` and
            `found_checkpoints` find and the registered models that are here.

    Raises:
        UserError: the target's weights are not on this disk, or a folder is not.
    """
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise UserError(f"expected directories to search for models, got {', '.join(missing)}")
    held = {each.name: each.path for each in found_checkpoints()}
    whole = _reads_of_target(_where(target.name, held), target.name)
    names = [name for name in models.REGISTRY if models.pulled(name)]
    names += [each.name for each in found_files()]
    names += held
    for folder in folders:
        names += [str(path) for path in sorted(folder.rglob("*.gguf"))]
        names += [str(path.parent) for path in sorted(folder.rglob("config.json"))]
    others = _each_once(names, held, besides=target.name)
    found = [_match(name, target, whole, held) for name in others]
    return sorted(found, key=lambda each: (bool(each.why_not), each.shared is not None, each.nbytes))


def _reads_of_target(where: Path, name: str) -> WeightReads:
    """What a target reads, which others are compared with."""
    try:
        return reads(where)
    except (OSError, KeyError, ValueError) as cause:
        why = "" if isinstance(cause, FileNotFoundError) else f" ({reason(cause)})"
        raise UserError(
            f"cannot read the weights of {name}{why}: expected a .gguf file, or a directory or hub id that is on this "
            f"disk with config.json and safetensors{models.about_kinds(name)}"
        ) from cause


def _each_once(names: Iterable[str], held: Mapping[str, Path], *, besides: str) -> list[str]:
    """The first name of each model; programs link to files, and one file may have several names."""
    found: dict[object, str] = {}
    for name in names:
        found.setdefault(_place(name, held), name)
    own = _place(besides, held)
    return [name for place, name in found.items() if place != own]


def _place(name: str, held: Mapping[str, Path]) -> object:
    """Equal for names of one file or directory; the name where it is not to be had, of which `_match` says why."""
    try:
        status = _where(name, held).stat()
    except (UserError, OSError):
        return name
    return status.st_dev, status.st_ino


def _where(name: str, held: Mapping[str, Path]) -> Path:
    """The file or directory of a model; `held` has those of hub ids in the hub's cache."""
    return held[name] if name in held else Path(models.resolve(name))


def _match(name: str, target: LoadedModel, whole: WeightReads, held: Mapping[str, Path]) -> Match:
    try:
        where = _where(name, held)
        nbytes = round(reads(where).of(1))
    except (UserError, OSError, KeyError, ValueError) as cause:
        return Match(name, 0, math.inf, str(cause))
    share = nbytes / whole.of(1)
    if share >= 1:
        return Match(name, nbytes, share, "it is not smaller than the target", growth=whole.growth)
    try:
        found = shared_tokens(target.tokenizer, load(str(where)).tokenizer, target_name=target.name, draft_name=name)
    except UserError as cause:
        return Match(name, nbytes, share, str(cause), growth=whole.growth)
    shared = None if found is None else share_of_text(found, target.tokenizer)
    return Match(name, nbytes, share, "", shared, whole.growth)


def own_layer(target: str) -> Match | None:
    """The target's own prediction layer as what drafts for it; None where it has none that is read here.

    It reads its layer and the output layer.
    """
    where = _where(target, {each.name: each.path for each in found_checkpoints()})
    try:
        if is_gguf(where):
            found = predicts(GGUFFile(where))
        else:
            config = read_object(where / "config.json", "the config of a model")
            found = (config.get("text_config") or config).get("model_type") in PREDICTING
            found = found and any(FIRST in _sizes(path) for path in weight_files(where))
        if not found:
            return None
        whole, ahead = reads(where), reads(where, ahead=True)
    except (UserError, OSError, KeyError, ValueError):
        return None
    return Match("mtp", round(ahead.of(1)), ahead.of(1) / whole.of(1), "", growth=whole.growth)


def reads(where: Path, *, ahead: bool = False) -> WeightReads:
    """What a model reads: all but the embedding, where the output layer has a table of its own.

    Args:
        where: its file or directory.
        ahead: of the prediction layer in it, with the output layer, instead of what plain decoding reads.

    Raises:
        OSError, KeyError, ValueError, UserError: it cannot be read.
    """
    if is_gguf(where):
        file = GGUFFile(where)
        sizes = {name: entry.nbytes for name, entry in file.tensors.items()}
        left, mark, own = ("token_embd.weight", "output.weight"), "_exps.", file.prediction_layers
        count, chosen = (file.of_architecture(f"expert_{kind}") for kind in ("count", "used_count"))
    else:
        sizes = {name: size for path in weight_files(where) for name, size in _sizes(path).items()}
        left, mark, own = ("embed_tokens.weight", "lm_head.weight"), ".experts.", ("mtp.",)
        config = read_object(where / "config.json", "the config of a model")
        count, chosen = (_named(config, names) for names in (_COUNTS, _CHOSEN))
    embedding, output = ([name for name in sizes if f".{name}".endswith(f".{each}")] for each in left)
    read = {name for name in sizes if name.startswith(own) == ahead} - {*embedding, *output}
    read |= {*(output or embedding)}
    experts = sum(sizes[name] for name in read if mark in name) if count and chosen else 0
    return WeightReads(sum(sizes[name] for name in read) - experts, experts, chosen / count if experts else 1.0)


_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_top_k")
"""What configs call the experts of a layer, and those of a token."""


def _named(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    text = config.get("text_config") or config
    return next((int(text[name]) for name in names if text.get(name)), None)


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of the tensors of a safetensors file, by name: from its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in spans.items()}
