"""Shards of tensors on disk: made when they are first needed, written whole or not at all, read from then on.

So an interrupted run repeats at most one shard, and goes on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.files import whole_file

SHARD = 32  # number of rows or sequences in a file


def shard(file: Path, make: Callable[[], Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], bool]:
    """The tensors of a file, on the host, and whether they were made now.

    The name of the file or of its folder must hold a hash of everything that the tensors depend on.
    """
    fresh = not file.exists()
    if fresh:
        made = make()
        with whole_file(file) as work:
            save_file({name: value.cpu().contiguous() for name, value in made.items()}, work)
    return load_file(file), fresh
