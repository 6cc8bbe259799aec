"""Copies to an accelerator that wait for nothing, and the wait for all its work, which a measured time needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, or equally long lists of them, as a tensor on a device; by default in torch's choice of dtype.

    A copy from ordinary memory to CUDA waits until the device has done all earlier work. A copy from pinned memory does
    not: it takes its turn behind that work.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done everything that it was told to do; on a CPU everything is done already."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
