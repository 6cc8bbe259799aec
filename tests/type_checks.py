"""Checks of shapes and types: every function of the package, in the first calls of each test and some later ones.

Long tests repeat the same calls thousands of times, and checks took two thirds of their time. A check is compiled at
the first call that needs it, so that importing the package stays fast. Beartype checks arguments and results around the
call; jaxtyping compares sizes between them where some have shapes, since its own decorator takes four times as long.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
import typing

import beartype
import jaxtyping

FIRST = 4  # checked calls of a function in a test; later ones whose number is a power of two
MOST_CLOSURES = 3  # checked closures of one inner function in a test: each has to be compiled again
_jaxtyped = jaxtyping.jaxtyped
_CHECK = beartype.beartype(conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError))
_test = 0
_off = False
_called = []  # what makes each function forget the calls of the test that runs
_made = {}  # inner functions, by their code: test and number of closures that were made


def install(package):
    """Check what is imported from a package from now on."""
    jaxtyping.jaxtyped = limited  # the import hook decorates with what has this name
    jaxtyping.install_import_hook(package, "beartype.beartype")


def start():
    """A test begins: every function is checked again."""
    global _test  # noqa: PLW0603
    _test += 1
    for forget in _called:
        forget()
    _called.clear()


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
    if "<locals>" in function.__qualname__ and not _few_closures(function.__code__):
        return function
    return _counting(function)


def _counting(function):
    """A function that checks some of its calls, by their numbers in a test."""
    checked, calls, unchecked = None, 0, 0

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal unchecked
        if unchecked > 0:  # most calls by far: they pay for this line and the next
            unchecked -= 1
            return function(*args, **kwargs)
        return counted(args, kwargs)

    def counted(args, kwargs):
        nonlocal checked, calls, unchecked
        if not calls:
            _called.append(forget)
        calls = calls + 1 if calls < FIRST else 1 << calls.bit_length()
        if calls >= FIRST:
            unchecked = (1 << calls.bit_length()) - calls - 1
        if _off:
            return function(*args, **kwargs)
        if checked is None:
            checked = _compiled(function)
        return checked(*args, **kwargs)

    def forget():
        nonlocal calls, unchecked
        calls = unchecked = 0

    return call


def _compiled(function):
    """A function with checks."""
    if inspect.isgeneratorfunction(function):
        return _jaxtyped(function, typechecker=_CHECK)
    hints = {name: _resolved(hint, function.__globals__) for name, hint in function.__annotations__.items()}
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = functools.update_wrapper(types.FunctionType(function.__code__, *parts), function)
    del copied.__wrapped__
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = hints
    checked = _CHECK(copied)
    if not any(map(_has_shapes, hints.values())):
        return checked

    def comparing(*args, **kwargs):
        with _jaxtyped("context"):
            return checked(*args, **kwargs)

    return comparing


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
