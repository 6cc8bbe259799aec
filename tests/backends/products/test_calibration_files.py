"""What calibration found is kept: the next start measures nothing and makes the same drafts; else it measures again."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftproof import native
from draftproof.backends.base import Feed
from draftproof.backends.heads.self_draft import QuantizedBackend
from draftproof.backends.hf import backend as hf
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean import backend as lean
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.products import calibration_files as kept_inputs
from draftproof.backends.products.calibration import TOKENS
from support.native_levels import needs_native
from support.uneven_models import uneven_model

pytestmark = needs_native


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """An empty home of its own; the native library is taken from the usual one."""
    native.levels()
    monkeypatch.setenv(kept_inputs.VARIABLE, "1")
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "calibration"


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes in which a model writes a text to be measured."""
    counted = []

    def watched(write):
        def written(*given):
            for _ in write(*given):
                counted.append(1)
                yield None

        return written

    for module in (lean, hf):
        monkeypatch.setattr(module, "write", watched(module.write))
    return counted


def logits(target):
    """Of the target's 4-bit form."""
    part = QuantizedBackend(target, 4)
    return part.forward([Feed(part.borrow(target.open()), [5, 9, 2, 7])])[0].logits


def made(kind=LeanBackend, seed=0):
    return kind(uneven_model(seed), name="llama")


@pytest.mark.parametrize("kind", [LeanBackend, HFBackend])
def test_the_next_start_measures_nothing_and_makes_the_same_drafts(kind, folder, passes):
    first = logits(made(kind))
    assert len(passes) == TOKENS
    assert torch.equal(logits(made(kind)), first)
    assert len(passes) == TOKENS
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    with safe_open(file, "pt") as found:
        about = found.metadata()
    assert about["model"] == "llama"
    assert "16 sequences of up to 9 tokens" in about["text"]
    assert {"what", "draftproof", "torch", "time"} < about.keys()
    assert set(json.loads(about["rows"]).values()) == {16 * (TOKENS - 1)}


def test_what_was_kept_is_used(folder, passes):
    first = logits(made())
    (file,) = folder.iterdir()
    found = load_file(file)
    for sums in found.values():
        sums[1] = sums[1].flip(0) + 1e3 * torch.arange(len(sums[1]))
    with safe_open(file, "pt") as old:
        save_file(found, file, metadata=old.metadata())
    file.chmod(0o600)
    assert not torch.equal(logits(made()), first), "a control: other figures make other drafts"
    assert len(passes) == TOKENS


@pytest.mark.parametrize("kind", [LeanBackend, HFBackend])
def test_other_weights_have_a_file_of_their_own(kind, folder, passes):
    logits(made(kind))
    changed = uneven_model()
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.add_(1e-3)
    logits(kind(changed, name="llama"))
    assert len(list(folder.iterdir())) == 2
    assert len(passes) == 2 * TOKENS


def shortened(file):
    file.write_bytes(file.read_bytes()[:-100])


def emptied(file):
    file.write_bytes(b"")


def open_to_others(file):
    file.chmod(0o666)


def with_sums(change):
    def broken(file):
        with safe_open(file, "pt") as old:
            about = old.metadata()
        found = load_file(file)
        about = change(found, about) or about
        save_file(found, file, metadata=about)
        file.chmod(0o600)

    return broken


BROKEN = {
    "shortened": shortened,
    "empty": emptied,
    "written by others": open_to_others,
    "NaN": with_sums(lambda found, _: found.update({"0.qkv": found["0.qkv"] * float("nan")})),
    "a negative square": with_sums(lambda found, _: found.update({"0.qkv": found["0.qkv"] - 1e9})),
    "another type": with_sums(lambda found, _: found.update({"0.qkv": found["0.qkv"].double()})),
    "one sum only": with_sums(lambda found, _: found.update({"0.qkv": found["0.qkv"][:1]})),
    "a matrix is missing": with_sums(lambda found, _: found.__delitem__("0.qkv")),
    "no rows": with_sums(lambda _, about: {**about, "rows": "{}"}),
    "rows of no number": with_sums(lambda _, about: {**about, "rows": "no JSON"}),
    "rows without end": with_sums(
        lambda _, about: {**about, "rows": json.dumps(dict.fromkeys(json.loads(about["rows"]), float("inf")))}
    ),
    "fewer than one row": with_sums(
        lambda _, about: {**about, "rows": json.dumps(dict.fromkeys(json.loads(about["rows"]), -1))}
    ),
    "no metadata": with_sums(lambda *_: {"other": "1"}),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("how", BROKEN)
def test_what_is_broken_is_measured_again_and_replaced(how, folder, passes):
    first = logits(made())
    (file,) = folder.iterdir()
    BROKEN[how](file)
    assert torch.equal(logits(made()), first)
    assert len(passes) == 2 * TOKENS
    assert torch.equal(logits(made()), first)
    assert len(passes) == 2 * TOKENS, "the file is whole again"


def test_a_home_that_cannot_be_written_costs_the_time_only(monkeypatch, tmp_path, passes):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "file" / "home"))
    assert torch.equal(logits(made()), logits(made()))
    assert len(passes) == 2 * TOKENS


def test_a_disk_that_is_full_costs_the_time_only(monkeypatch, folder, passes):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_inputs, "save_file", full)
    logits(made())
    assert list(folder.iterdir()) == []


def test_it_can_be_turned_off(monkeypatch, folder, passes):
    logits(made())
    monkeypatch.setenv(kept_inputs.VARIABLE, "0")
    logits(made())
    assert len(passes) == 2 * TOKENS
    assert len(list(folder.iterdir())) == 1


def test_a_start_that_ends_early_keeps_nothing(folder):
    steps = made().quantizing(4)
    for _ in range(4):
        next(steps)
    steps.close()
    assert not folder.exists()


@pytest.mark.parametrize("kind", [LeanBackend, HFBackend])
def test_weights_that_training_changes_are_not_kept(kind, folder, passes):
    first = made(kind)
    logits(first.with_weights(uneven_model(1)))
    assert not folder.exists()
    assert len(passes) == TOKENS


def test_the_oldest_files_go(monkeypatch, folder):
    monkeypatch.setattr(kept_inputs, "MOST", 2)
    logits(made(seed=0))
    (kept,) = folder.iterdir()
    logits(made(seed=1))
    (second,) = set(folder.iterdir()) - {kept}
    for file, seconds in ((kept, 1000), (second, 2000)):
        os.utime(file, (seconds, seconds))
    logits(made(seed=0))
    logits(made(seed=2))
    assert kept in set(folder.iterdir()), "it was used last"
    assert second not in set(folder.iterdir())
    assert len(list(folder.iterdir())) == 2


def test_with_8_bits_nothing_is_measured_or_kept(folder, passes):
    made().quantized(8)
    assert (passes, folder.exists()) == ([], False)
