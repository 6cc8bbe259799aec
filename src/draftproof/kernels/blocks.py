"""How kernels cut a row of the vocabulary, and the sum of its blocks.

Knows: block sizes and float64 partial sums. Does not know: what is summed.
"""

from __future__ import annotations

import torch
import triton
from jaxtyping import Float
from torch import Tensor

BLOCK = 4096


def block_of(vocab: int) -> int:
    """Entries of a block, a power of two: a function of the vocabulary alone, so that batches change no sum."""
    return int(min(BLOCK, triton.next_power_of_2(vocab)))


def partials(rows: int, vocab: int, device: torch.device) -> Float[Tensor, "rows blocks"]:
    """Where a kernel with one program for each row and block leaves its sums; its shape is the kernel's grid."""
    return torch.empty(rows, triton.cdiv(vocab, block_of(vocab)), dtype=torch.float64, device=device)
