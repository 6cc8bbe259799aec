"""The blocks into which kernels cut a row of the vocabulary, and their partial sums."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

import triton

BLOCK = 4096


def block_of(vocab: int) -> int:
    """Entries of a block, a power of two; it depends on the vocabulary only, so that no batch changes a sum."""
    return int(min(BLOCK, triton.next_power_of_2(vocab)))


def partials(rows: int, vocab: int, device: torch.device) -> Float[Tensor, "rows blocks"]:
    """An empty tensor for the sums of a kernel with one program for each row and block; its shape is the grid."""
    return torch.empty(rows, triton.cdiv(vocab, block_of(vocab)), dtype=torch.float64, device=device)
