"""Checks of shapes and types are on in the first calls of every function in a test, and off only after many."""

import inspect

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import type_checks
from draftproof.native import greedy, softmax
from draftproof.native.build import Level
from draftproof.tree import TokenTree


def test_a_wrong_type_is_found_in_the_first_calls_of_a_test():
    with pytest.raises(jaxtyping.TypeCheckError):
        softmax([1.0, 2.0])


def test_dataclasses_methods_and_class_methods_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        Level(name=5, needs=frozenset(), flags=())
    with pytest.raises(jaxtyping.TypeCheckError):
        TokenTree.chain(5)


def test_checks_of_a_function_end_after_many_calls_and_others_go_on(monkeypatch):
    monkeypatch.setattr(type_checks, "MOST", 4)
    rows = torch.zeros(1, 2)
    for _ in range(4):
        softmax(rows)
    with pytest.raises(AttributeError):
        softmax([1.0, 2.0])
    with pytest.raises(jaxtyping.TypeCheckError):
        greedy([1.0, 2.0])
    type_checks.start()
    with pytest.raises(jaxtyping.TypeCheckError):
        softmax([1.0, 2.0])


def test_shapes_are_compared_between_arguments():
    @type_checks.limited
    def first(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x[:1] + y[:1]

    assert first(torch.zeros(1), torch.zeros(1)).shape == (1,)
    with pytest.raises(jaxtyping.TypeCheckError, match="the parameters of"):
        first(torch.zeros(2), torch.zeros(3))
    with pytest.raises(jaxtyping.TypeCheckError, match="the return value"):
        first(torch.zeros(2), torch.zeros(2))


def test_only_the_first_closures_of_an_inner_function_are_compiled():
    def made():
        @type_checks.limited
        def inner(x: int) -> int:
            return x

        return inner

    results = [made() for _ in range(type_checks.MOST_CLOSURES + 1)]
    for first in results[:-1]:
        with pytest.raises(jaxtyping.TypeCheckError):
            first("x")
    assert results[-1]("x") == "x"
    type_checks.start()
    with pytest.raises(jaxtyping.TypeCheckError):
        made()("x")


def test_a_wrapped_function_keeps_its_name_and_signature():
    assert softmax.__name__ == "softmax"
    assert list(inspect.signature(softmax).parameters) == ["x"]
