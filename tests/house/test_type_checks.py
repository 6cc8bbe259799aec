"""Checks of shapes and types are on in the first calls of every function in a test, and in some of the later ones."""

import inspect
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import type_checks
from draftproof.native import softmax
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


def test_later_calls_of_a_function_are_checked_ever_less_and_others_at_once(monkeypatch):
    monkeypatch.setattr(type_checks, "FIRST", 3)
    one, other = (type_checks.limited(numbered) for _ in range(2))
    assert [call for call in range(1, 41) if refuses(one)] == [1, 2, 3, 4, 8, 16, 32]
    assert refuses(other)
    type_checks.start()
    assert refuses(one)


def numbered(x: int) -> object:
    return x


def refuses(function):
    try:
        return function("x") != "x"
    except jaxtyping.TypeCheckError:
        return True


def test_checks_may_be_off_for_a_while():
    with type_checks.checks_off(), type_checks.checks_off(now=False), pytest.raises(AttributeError):
        softmax([1.0, 2.0])
    with type_checks.checks_off(now=False), pytest.raises(jaxtyping.TypeCheckError):
        softmax([1.0, 2.0])


def test_shapes_are_compared_between_arguments():
    @type_checks.limited
    def first(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x[:1] + y[:1]

    assert first(torch.zeros(1), torch.zeros(1)).shape == (1,)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"parameter y=.* size of dimension n is 3"):
        first(torch.zeros(2), torch.zeros(3))
    with pytest.raises(jaxtyping.TypeCheckError, match=r"return .* size of dimension n is 1"):
        first(torch.zeros(2), torch.zeros(2))


def test_sizes_are_those_of_one_call():
    """An inner call has sizes of its own, and one without shapes has none."""

    @type_checks.limited
    def outer(x: Float[Tensor, " n"], *, deep: int = 2) -> Float[Tensor, " n"]:
        return passed(outer, x, deep) if deep else x

    @type_checks.limited
    def passed(function: object, x: Tensor, deep: int) -> Tensor:
        function(torch.zeros(len(x) + 1), deep=deep - 1)
        return x

    assert outer(torch.zeros(3)).shape == (3,)
    with pytest.raises(jaxtyping.TypeCheckError):
        outer(torch.zeros(3), deep=1.5)


def test_shapes_are_found_inside_of_other_hints():
    @type_checks.limited
    def both(pair: "tuple[Float[Tensor, ' n'], int] | None", more: list[Float[Tensor, " n"]]) -> dict[str, Tensor]:
        return {} if pair is None else {"sum": pair[0] + more[0]}

    both((torch.zeros(2), 1), [torch.zeros(2)])
    with pytest.raises(jaxtyping.TypeCheckError):
        both((torch.zeros(2), 1), [torch.zeros(3)])


def test_generators_are_checked_when_they_are_made():
    @type_checks.limited
    def numbers(count: int) -> Iterator[int]:
        yield from range(count)

    assert list(numbers(3)) == [0, 1, 2]
    with pytest.raises(jaxtyping.TypeCheckError):
        numbers("x")


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
