"""Checks of shapes and types are on at the beginning of every test, and off only after many calls."""

import jaxtyping
import pytest
import torch

import type_checks
from draftproof.kernels.native import softmax


def test_a_wrong_type_is_found_in_the_first_calls_of_a_test():
    with pytest.raises(jaxtyping.TypeCheckError):
        softmax([1.0, 2.0])


def test_checks_end_after_many_calls_and_start_again(monkeypatch):
    monkeypatch.setattr(type_checks, "MOST", 4)
    rows = torch.zeros(1, 2)
    for _ in range(4):
        softmax(rows)
    with pytest.raises(AttributeError):
        softmax([1.0, 2.0])
    type_checks.start()
    with pytest.raises(jaxtyping.TypeCheckError):
        softmax([1.0, 2.0])
