"""Checks of shapes and types: every function of the package, in its first calls of each test.

Long tests repeat the same calls thousands of times, and checks took two thirds of their time. A check is compiled at
the first call that needs it, so that importing the package stays fast.
"""

import contextlib
import dataclasses
import functools
import inspect

import beartype
import jaxtyping

MOST = 30  # checked calls of a function in a test
MOST_CLOSURES = 3  # checked closures of one inner function in a test: each has to be compiled again
_compiled = jaxtyping.jaxtyped
_test = 0
_off = False
_made = {}  # inner functions, by their code: test and number of closures that were made


def install(package):
    """Check what is imported from a package from now on."""
    jaxtyping.jaxtyped = limited  # the import hook decorates with what has this name
    jaxtyping.install_import_hook(package, "beartype.beartype")


def start():
    """A test begins: every function is checked again."""
    global _test  # noqa: PLW0603
    _test += 1


@contextlib.contextmanager
def off():
    """No check of types, for tests of what a caller without checks gets."""
    global _off  # noqa: PLW0603
    _off = True
    try:
        yield
    finally:
        _off = False


def limited(function=None, *, typechecker=beartype.beartype):
    """jaxtyping's decorator, for the first `MOST` calls of a function in each test; later ones go to it directly."""
    if function is None:
        return functools.partial(limited, typechecker=typechecker)
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) and "__init__" in vars(function):
            function.__init__ = limited(function.__init__, typechecker=typechecker)
        return function
    if "<locals>" in function.__qualname__ and not _few_closures(function.__code__):
        return function
    checked, test, calls = None, -1, 0

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal checked, test, calls
        if test != _test:
            test, calls = _test, 0
        if _off or calls >= MOST:
            return function(*args, **kwargs)
        calls += 1
        if checked is None:
            checked = _compiled(function, typechecker=typechecker)
        return checked(*args, **kwargs)

    return call


def _few_closures(code):
    test, made = _made.get(code, (_test, 0))
    made = made + 1 if test == _test else 1
    _made[code] = _test, made
    return made <= MOST_CLOSURES
