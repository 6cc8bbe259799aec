"""Checks of shapes and types: every function of the package, in the first calls of each test and some later ones.

Long tests repeat the same calls thousands of times, and checks took two thirds of their time. So a function has other
code while its calls are counted, and its own from then on: counting alone took a tenth of the suite. It is counted
again in each test, and once more in rounds of decoding whose number is a power of two, which are late in a test.

A check is compiled at the first call that needs it, so that importing the package stays fast. Beartype checks arguments
and results around the call; jaxtyping compares sizes between them where some have shapes, since its own decorator takes
four times as long.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
import typing

import beartype
import jaxtyping
from typing_extensions import override

FIRST = 4  # checked calls of a function in a test; later ones whose number is a power of two
COUNTED = 32  # calls after which a function has its own code
MOST_CLOSURES = 3  # checked closures of one inner function in a test: each has to be compiled again
_jaxtyped = jaxtyping.jaxtyped
_CHECK = beartype.beartype(conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError))
_test = 0
_off = False
_rounds = None  # the name of the function whose calls are rounds
_uncounted = []  # functions that have their own code
_made = {}  # inner functions, by their code: test and number of closures that were made


def install(package, rounds):
    """Check what is imported from a package from now on, again in some of the calls of the function named `rounds`."""
    global _rounds  # noqa: PLW0603
    _rounds = rounds
    jaxtyping.jaxtyped = limited  # the import hook decorates with what has this name
    jaxtyping.install_import_hook(package, "beartype.beartype")


def start():
    """A test begins: every function is checked again."""
    global _test  # noqa: PLW0603
    _test += 1
    _count_again()


def _count_again():
    while _uncounted:
        _uncounted.pop().count()


@contextlib.contextmanager
def checks_off(*, now=True):
    """No checks within this, for tests of what a caller without checks gets, and for what repeats the same calls."""
    global _off  # noqa: PLW0603
    before, _off = _off, now or _off
    try:
        yield
    finally:
        _off = before


def limited(function=None, *, typechecker=None):
    """jaxtyping's decorator, for some calls of a function in each test; all others go to it directly."""
    if function is None:
        return limited
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) and "__init__" in vars(function):
            function.__init__ = limited(function.__init__)
        return function
    if not function.__annotations__:
        return function
    if "<locals>" not in function.__qualname__:
        CountedCode(function)
        return function
    if not _few_closures(function.__code__):
        return function
    calls = Calls(function)  # no other code: what that holds is not freed in a circle, and closures hold much

    @functools.wraps(function)
    def call(*args, **kwargs):
        return calls.next()(*args, **kwargs)

    return call


class Calls:
    """The calls of a function in a test, and which of them are checked."""

    def __init__(self, function):
        self._bare = function
        self._checked = None
        self._test = -1
        self._number = 0

    def next(self):
        """What answers the next call: the function with or without checks."""
        if self._test != _test:
            self._test = _test
            self._number = 0
        self._number += 1
        if _off or self._is_between():
            return self._bare
        if self._checked is None:
            self._checked = _compiled(self._bare)
        return self._checked

    def _is_between(self):
        return self._number > FIRST and self._number & (self._number - 1)


class CountedCode(Calls):
    """The calls of a function that has the code of `_counted` while they are counted."""

    def __init__(self, function):
        super().__init__(_copy(function))
        self._function = function
        self._own = function.__code__
        constants = tuple(self if each == _CALLS else each for each in _counted.__code__.co_consts)
        names = {"co_name": self._own.co_name, "co_qualname": self._own.co_qualname}
        self._counting = _counted.__code__.replace(co_consts=constants, co_freevars=self._own.co_freevars, **names)
        function.__wrapped__ = self._bare  # signatures are read from it
        self.count()

    def count(self):
        """Count from now on: in a test where this was done to the end, the next call alone, which is checked."""
        self._number = min(self._number, COUNTED - 1)
        self._function.__code__ = self._counting

    @override
    def next(self):
        answering = super().next()
        if self._function.__qualname__ == _rounds:
            if not self._is_between():
                _count_again()
        elif self._number >= COUNTED:
            self._function.__code__ = self._own
            _uncounted.append(self)
        return answering


_CALLS = "the calls of a function"


def _counted(*args, **kwargs):
    calls = "the calls of a function"
    return calls.next()(*args, **kwargs)


def _compiled(function):
    """A function with checks."""
    if inspect.isgeneratorfunction(function):
        return _jaxtyped(function, typechecker=_CHECK)
    copied = _copy(function)
    copied.__annotations__ = hints = {
        name: _resolved(hint, function.__globals__) for name, hint in function.__annotations__.items()
    }
    checked = _CHECK(copied)
    if not any(map(_has_shapes, hints.values())):
        return checked

    def comparing(*args, **kwargs):
        with _jaxtyped("context"):
            return checked(*args, **kwargs)

    return comparing


def _copy(function):
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = functools.update_wrapper(types.FunctionType(function.__code__, *parts), function)
    del copied.__wrapped__
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _resolved(hint, names):
    """What a hint stands for; anything, where it names what only a type checker sees."""
    try:
        holder = types.SimpleNamespace(__annotations__={"hint": hint})
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:  # noqa: BLE001 - names that are unknown at run time, in many ways
        return typing.Any


def _has_shapes(hint):
    if isinstance(hint, list):  # the arguments of a Callable
        return any(map(_has_shapes, hint))
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shapes, typing.get_args(hint)))


def _few_closures(code):
    test, made = _made.get(code, (_test, 0))
    made = made + 1 if test == _test else 1
    _made[code] = _test, made
    return made <= MOST_CLOSURES
