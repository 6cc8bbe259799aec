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

    vLLM calls it outside of any try, also where nobody asked for draftproof. So it raises nothing: what keeps it from
    working is one line in the log.
    """
    try:
        import vllm

        known = str(getattr(vllm, "__version__", "of no version"))
        if ".".join(known.split(".")[:2]) not in KNOWN:
            _log.warning("draftproof does not know vLLM %s (it knows %s): it changes nothing", known, ", ".join(KNOWN))
            return
        from draftproof.integrations.vllm import seams

        seams.prepare()
    except ModuleNotFoundError as error:
        _log.warning("draftproof changes nothing in vLLM: there is no package %s; install it", error.name)
    except Exception as error:  # noqa: BLE001 - see above
        cause = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        _log.warning("draftproof changes nothing in vLLM: %s", cause)


def __getattr__(name: str) -> Any:
    if name == "Proposer":  # vLLM's `custom_class` takes it by this name
        from draftproof.integrations.vllm.proposer import Proposer

        return Proposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
