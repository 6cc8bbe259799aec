"""What calibration found of a model's inputs, kept in files: the next start of the same model need not measure again.

A file is found by the model's weights: names and shapes of all matrices, and some numbers of each. So it does not
matter where a model comes from, and other weights have another file. What is kept decides only which drafts are made,
never what is accepted; a file that is missing or broken costs the time of measuring.

Each file says in its metadata where its figures come from. `DRAFTPROOF_CALIBRATION=0` turns this off.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftproof import native
from draftproof._version import __version__
from draftproof.backends.products import calibration
from draftproof.backends.products.calibration import InputStatistics
from draftproof.errors import reason
from draftproof.files import Store

VARIABLE = "DRAFTPROOF_CALIBRATION"
MOST = 64  # files; the oldest are removed
_BYTES = 1 << 30
_FORMAT = 1
_SAMPLED = 1024  # numbers of each matrix that identify it
_log = logging.getLogger(__name__)


def measure(
    statistics: Mapping[str, InputStatistics],
    weights: Mapping[str, Tensor],
    write: Callable[[Collection[InputStatistics]], Iterator[None]],
    *,
    name: str,
    kept: bool = True,
) -> Generator[None]:
    """Fill statistics with what was found in an earlier run; else let the model write a text, in steps, and keep it.

    Statistics are empty; weights are found by the same names, and may be parts of a layout of them. Nothing is kept of
    weights that change in every step of a training.
    """
    place = _name(weights) if kept and os.environ.get(VARIABLE) != "0" else None
    if place is not None and _read(place, statistics):
        return
    for each in statistics.values():
        each.clear()
    yield from write(statistics.values())
    if place is not None:
        _keep(place, statistics, name)


def _store() -> Store:
    return Store("calibration", [_FORMAT, _code(), torch.__version__, native.levels()], most=MOST, most_bytes=_BYTES)


def _name(weights: Mapping[str, Tensor]) -> str:
    """The name of a model's file, by its weights and by all else that the text depends on."""
    made = hashlib.sha256()
    for name, weight in weights.items():
        made.update(json.dumps([name, list(weight.shape), str(weight.dtype), weight.device.type]).encode())
        flat = weight.detach().reshape(-1)
        some = torch.linspace(0, len(flat) - 1, min(_SAMPLED, len(flat)), dtype=torch.float64).long()
        made.update(flat[some.to(flat.device)].to("cpu", torch.float32).numpy().tobytes())
    return _store().name(made.hexdigest(), ".safetensors")


@functools.cache
def _code() -> str:
    """A hash of the code that chooses the text and sums."""
    return hashlib.sha256(Path(calibration.__file__).read_bytes()).hexdigest()


def _read(name: str, statistics: Mapping[str, InputStatistics]) -> bool:
    """Fill statistics from a file; whether that was possible, else they are left as they are."""
    if (place := _store().find(name)) is None:
        return False
    try:
        with safe_open(place, "pt") as file:
            counts = json.loads((file.metadata() or {})["rows"])
            rows = {matrix: int(counts[matrix]) for matrix in statistics}
            found = {matrix: (count, file.get_tensor(matrix)) for matrix, count in rows.items() if count}
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, the inputs can be measured
        _log.info("%s cannot be used (%s): inputs are measured again", place, reason(error))
        return False
    if not found or not all(count > 0 and _sensible(sums) for count, sums in found.values()):
        _log.info("%s holds numbers that are no sums: inputs are measured again", place)
        return False
    for matrix, (count, sums) in found.items():
        statistics[matrix].restore(count, sums)
    return True


def _sensible(sums: Tensor) -> bool:
    form = sums.dtype == torch.float32 and sums.dim() == 2 and len(sums) == 2
    return form and bool(sums.isfinite().all()) and bool((sums[1] >= 0).all())


def _keep(place: str, statistics: Mapping[str, InputStatistics], name: str) -> None:
    """Write what was measured, unless it is of no use."""
    sums = {key: found for key, each in statistics.items() if (found := each.sums()) is not None}
    if not sums or not all(map(_sensible, sums.values())):
        return
    about: dict[str, Any] = {
        "rows": json.dumps({key: each.rows for key, each in statistics.items()}),
        "model": name,
        "text": f"{calibration.ROWS} sequences of up to {calibration.TOKENS} tokens that the model drew, temperature 1",
        "what": "for each matrix the sums of its inputs and of their squares",
        "draftproof": __version__,
        "torch": torch.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }

    def write(work: Path) -> None:
        try:
            save_file(sums, work, metadata=about)
        except SafetensorError as error:
            raise OSError(reason(error)) from error

    _store().keep(place, write)
