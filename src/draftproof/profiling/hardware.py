"""Limits of this machine: memory bandwidth, rate of a large product, and the weights that a pass must read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from draftproof import models
from draftproof.accelerator import synchronize
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.models.gguf_file import GGUFFile, is_gguf

_CPU = torch.device("cpu")


def bandwidth(size: int = 2**28, repeats: int = 10, device: torch.device | str = "cpu") -> float:
    """Bytes read from memory per second: the best of several sums and products over more bytes than fit into a cache.

    Which of the two is the faster one differs between processors.
    """
    data = torch.ones((1024, size // 4096), device=device)
    vector = torch.ones(data.shape[1], device=device)
    calls = (data.sum, lambda: data @ vector)
    return data.nbytes / min(_fastest(call, repeats, data.device) for call in calls)


def product_rate(dtype: torch.dtype, size: int = 2048, repeats: int = 8) -> float:
    """Operations per second of a large matrix product: the best of several."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: a @ b, repeats)


def _fastest(call: Callable[[], object], repeats: int, device: torch.device = _CPU) -> float:
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class ReadWeights(NamedTuple):
    """Number and bytes of the weights that a pass reads; a GGUF file's dtype is that of its hidden states."""

    entries: int
    nbytes: int
    dtype: torch.dtype


def weights_read(name: str, dtype: str) -> ReadWeights:
    """The weights that one forward pass of a model reads; the model is loaded to count them, a GGUF file is not.

    The input embedding counts only if it is also the output layer; otherwise a pass reads only a few of its rows.
    """
    where = Path(models.resolve(name))
    if is_gguf(where):
        tensors = GGUFFile(where).read_for_a_token
        count, nbytes = sum(math.prod(each.shape) for each in tensors), sum(each.nbytes for each in tensors)
        return ReadWeights(count, nbytes, LoadOptions(dtype=dtype).own_dtype(torch.float32) or torch.float32)
    model = load_backend(name, LoadOptions(dtype=dtype, check=False, backend="hf")).model
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    read = [weights for weights in model.parameters() if weights is not embedding or embedding is output]
    return ReadWeights(sum(weights.numel() for weights in read), sum(weights.nbytes for weights in read), output.dtype)
