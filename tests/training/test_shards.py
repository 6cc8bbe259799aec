"""Shards of tensors: made once, whole or not at all."""

import pytest
import torch

from draftproof.training.shards import shard


def test_a_shard_is_made_once(tmp_path):
    file = tmp_path / "folder" / "a.safetensors"
    rows = torch.arange(6.0).view(2, 3).t()  # not contiguous
    found, fresh = shard(file, lambda: {"rows": rows})
    assert fresh
    assert torch.equal(found["rows"], rows)
    again, fresh = shard(file, lambda: pytest.fail("it is there"))
    assert not fresh
    assert torch.equal(again["rows"], rows)


def test_a_shard_that_was_interrupted_is_not_there(tmp_path):
    file = tmp_path / "a.safetensors"

    def dying():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shard(file, dying)
    assert not list(tmp_path.iterdir())
    assert shard(file, lambda: {"rows": torch.ones(1)})[1]
