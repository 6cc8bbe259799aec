"""Models with recurrent layers in GGUF files: logits equal transformers', and drafts change no token."""

import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.hf.snapshots import SnapshotBackend
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.gguf_hybrid import HYBRIDS, read_hybrid
from draftproof.backends.loading.gguf_model import in_own_numbers
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.products.stored_modules import StoredLinear
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.registry import make_verifier
from draftproof.models.gguf_file import GGUFFile
from draftproof.tree import TokenTree
from support.gguf_hybrids import CONFIGS, hybrid_model, write_hybrid

IDS = [5, 9, 2, 7, 11, 3, 300, 41, 17, 8, 260, 77, 30, 31, 32]
Q8_0, FEW = (8,), (12, 14, 8)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file of a case and the model in it, made once."""
    folder = tmp_path_factory.mktemp("hybrids")

    @functools.cache
    def get(name, kinds=FEW):
        model, path = hybrid_model(name), folder / f"{name.replace(', ', '-')}-{kinds}.gguf"
        write_hybrid(path, model, name, kinds)
        return model, path

    return get


@pytest.fixture(scope="module")
def loaded(written):
    """A backend with few bits, made once."""

    @functools.cache
    def get(name, dtype=torch.float32):
        return read_hybrid(GGUFFile(written(name)[1]), name=name, dtype=dtype)

    return get


def logits_of(backend, ids=IDS):
    session = backend.open()
    try:
        return backend.forward([Feed(session, ids[:1], TokenTree.chain(torch.tensor(ids[1:])))])[0].logits
    finally:
        session.close()


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_every_architecture_has_a_case():
    assert {name.split(",")[0] for name in CONFIGS} == set(HYBRIDS)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, written):
    model, path = written(name, (None,))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert off(logits_of(read_hybrid(GGUFFile(path), name=name, dtype=torch.float32)), expected) < 1e-5
    _, few = written(name, Q8_0)
    backend = read_hybrid(GGUFFile(few), name=name, dtype=torch.float32)
    assert 1e-5 < off(logits_of(backend), expected) < 0.15, "weights and inputs have 8 bits"


@pytest.mark.parametrize("name", CONFIGS)
def test_products_of_blocks_are_those_of_their_numbers(name, written, loaded):
    dense = read_hybrid(GGUFFile(written(name)[1]), name=name, dtype=torch.float32, activations="float")
    assert 1e-5 < off(logits_of(loaded(name)), logits_of(dense)) < 0.15


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_are_equal_with_and_without_drafts(name, loaded):
    backend, prompt = loaded(name), [5, 9, 2, 7] * 4
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=4, ignore_eos=True)
        texts = []
        for drafter in (None, NgramDrafter()):
            engine = Engine(backend, drafter, make_verifier("gumbel"))
            (made,) = engine.generate(prompt, params)
            texts.append(made.token_ids)
            several = engine.generate([prompt[::-1], prompt, [7, 300, 41]], params)
            assert temperature or several[1].token_ids == made.token_ids, "beside others"
        assert texts[0] == texts[1]
