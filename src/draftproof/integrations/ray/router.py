"""Ray's prefix-aware router without two of its faults, for several processes that share its record of prefixes."""

from __future__ import annotations

from typing import Any, no_type_check

# ray.serve.llm, where it is public, imports vLLM or SGLang and fails without them.
from ray.exceptions import RayError
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter


@no_type_check  # Ray sends the class by its value, which checks at run time do not survive
class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]  # Ray's internals have no types
    """Ray's router, which goes by load alone where the record of prefixes is of no use.

    The record is one actor for all routers. It may name a replica that this router does not know yet, or not any more;
    and the actor may die with its node. In Ray 2.60 either is an exception, after which the request waits for ever.
    """

    @no_type_check
    async def _prefix_match_best_replicas(self, *given: Any, **named: Any) -> list[list[Any]]:
        try:
            found: list[list[Any]] = await super()._prefix_match_best_replicas(*given, **named)
        except (KeyError, RayError):
            return [[]]
        return found

    @no_type_check
    def on_request_routed(self, *given: Any, **named: Any) -> None:
        """Note who got a prompt, where that can be noted."""
        try:
            super().on_request_routed(*given, **named)
        except RayError:
            return
