"""Copies to an accelerator that wait for nothing, and the wait for all its work, which a measured time needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers as a tensor on a device.

    A copy from ordinary memory to CUDA waits until the device has done all earlier work. A copy from pinned memory does
    not: it takes its turn behind that work.

    Args:
        values: numbers, or equally long lists of them.
        device: where they are needed.
        dtype: of the tensor; None for torch's choice.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done everything that it was told to do; on a CPU everything is done already."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
