"""Weights lie in memory that Linux may hold in huge pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof import native
from draftproof.native import huge_pages
from draftproof.native.tensors import Interleaved

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not _SETTING.is_file(), reason="this system has no huge pages that can be asked for"
)


def _is_advised(memory: Tensor) -> bool:
    """Whether the middle of a tensor lies in a mapping that is marked for huge pages."""
    middle, inside = memory.data_ptr() + memory.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= middle < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the tensor is in no mapping")


def test_memory_of_weights_is_marked() -> None:
    made = huge_pages.empty_weight((1 << 12, 1 << 13), torch.float32)
    assert made.shape == (1 << 12, 1 << 13)
    assert made.dtype == torch.float32
    assert _is_advised(made)
    assert not _is_advised(torch.empty(1 << 25, dtype=torch.float32))  # the control: other memory is not


@pytest.mark.parametrize("form", ["plain", "rounded"])
def test_packed_weights_are_in_it(form: str) -> None:
    packed = Interleaved.of(torch.randn(2048, 4096))
    if form == "rounded":
        blocks = native.operations_for(torch.empty(0)).quantize(packed, 4, 32).blocks
    else:
        blocks = packed.blocks
    assert _is_advised(blocks)


def test_a_system_without_it_gives_usual_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_ADVICE", None)
    assert not _is_advised(huge_pages.empty_weight((1 << 25,), torch.float32))


def test_memory_that_cannot_be_advised_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_ADVICE", 9999)  # Linux refuses it
    made = huge_pages.empty_weight((1 << 20,), torch.float32)
    assert float(made.fill_(1.0).sum()) == 1 << 20
