"""vLLM's plug-in: our verification rules in vLLM's sampler, our lookup drafters as its proposer.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. On a version of
vLLM that it was not made for it says so in one line and changes nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.integrations.vllm.proposer import Proposer

__all__ = ["Proposer", "register"]

KNOWN = ("0.32",)
"""Versions of vLLM, without the last number, whose seams are those of `draftproof.integrations.vllm.seams`."""

_log = logging.getLogger("vllm.draftproof")  # a child of vLLM's logger, so that its handler and format are used


def register() -> None:
    """Put our functions into vLLM's seams; called by vLLM, once in each process.

    Raises:
        ImportError: vLLM is not installed.
    """
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError("draftproof.integrations.vllm needs vLLM, which is not installed: pip install vllm") from None
    if ".".join(vllm.__version__.split(".")[:2]) not in KNOWN:
        _log.warning(
            "draftproof does not know vLLM %s (it knows %s): it changes nothing", vllm.__version__, ", ".join(KNOWN)
        )
        return
    from draftproof.integrations.vllm import seams

    seams.prepare()


def __getattr__(name: str) -> Any:
    if name == "Proposer":  # vLLM's `custom_class` takes it by this name
        from draftproof.integrations.vllm.proposer import Proposer

        return Proposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
