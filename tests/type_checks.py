"""Checks of shapes and types: every function of the package, in the first calls of each test.

Long tests repeat the same calls thousands of times, and checks take two thirds of their time.
"""

import functools

import beartype
import jaxtyping

MOST = 20_000  # checks of a test
_made = 0


def counted(function):
    """beartype's decorator, which switches all checks off after `MOST` of them."""
    checked = beartype.beartype(function)

    @functools.wraps(checked)
    def call(*args, **kwargs):
        global _made  # noqa: PLW0603
        _made += 1
        if _made == MOST:
            jaxtyping.config.update("jaxtyping_disable", True)
        return checked(*args, **kwargs)

    return call


def start():
    """Check from now on."""
    global _made  # noqa: PLW0603
    _made = 0
    jaxtyping.config.update("jaxtyping_disable", False)
