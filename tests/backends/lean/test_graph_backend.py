"""What recorded passes refuse; tests/triton has what they compute."""

import pytest

from draftproof import Engine, UserError
from draftproof.backends.lean.graph_backend import GraphBackend
from support.helpers import CONFIGS, random_model


def test_passes_are_recorded_on_cuda_only():
    with pytest.raises(UserError, match="backend graphs records passes on CUDA, and the model is on cpu: use lean"):
        GraphBackend(random_model(CONFIGS["llama"]()), name="llama")


def test_the_former_name_is_taken_with_a_warning(caplog):
    with pytest.raises(UserError, match="backend graphs records passes on CUDA"):
        Engine.load("embedded:target", backend="compiled", device="cpu")
    assert "backend compiled is now called graphs" in caplog.text
