"""The drafters that use published heads, declared once."""

from __future__ import annotations

from collections.abc import Callable

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import TargetHead
from draftproof.backends.heads.published.assistant import AssistantBackend
from draftproof.backends.heads.published.dflash import DFlashBackend, DFlashNet
from draftproof.backends.heads.published.dflash2 import DFlash2Net
from draftproof.backends.heads.published.dspark import DSparkNet
from draftproof.backends.heads.published.eagle import eagle_backend
from draftproof.backends.heads.published.eagle3 import eagle3_backend
from draftproof.backends.heads.published.medusa import MedusaBackend
from draftproof.backends.heads.published.mtp import mtp_backend
from draftproof.backends.heads.published.mtp_head import mtp_head_backend
from draftproof.backends.heads.published.peagle import PEagleBackend
from draftproof.backends.heads.published.rounding import rounded_head
from draftproof.drafters.base import Drafter
from draftproof.engine.composition import HEAD
from draftproof.engine.drafter_context import DrafterContext, DrafterPart
from draftproof.engine.parts import has_several_chains, own_chain_count, source
from draftproof.errors import UserError


def _head(name: str, load: Callable[[str, SlotBackend], TargetHead]) -> Callable[[DrafterContext, str], Drafter]:
    """A drafter from a head in a directory or on the hub."""

    def build(parts: DrafterContext, argument: str) -> Drafter:
        where, chains = _named(name, argument)

        def read(bits: int | None) -> TargetHead:
            with rounded_head(f"the head {where}", bits, whole=parts.whole):
                return load(where, parts.target_backend(name))

        return parts.head_drafter(parts.with_head_bits(read), name, chains)

    return build


def _named(name: str, argument: str) -> tuple[str, int]:
    """The head in an argument, and the number of chains."""
    where, chains = source(argument)
    if not where:
        raise UserError(
            f"drafter {name}: expected the directory or hub id of a head, for example {name}:heads/mine or "
            f"{name}:OWNER/NAME, got none"
        )
    return where, chains


def _part(name: str, about: str, load: Callable[[str, SlotBackend], TargetHead]) -> DrafterPart:
    return DrafterPart(
        name=name,
        argument="HEAD",
        about=f"{about}; HEAD is a directory or a hub id, {name}:HEADxK makes K chains",
        make=_head(name, load),
        traits=HEAD,
        branches=has_several_chains,
        chains=own_chain_count,
        check=lambda argument: _named(name, argument),
    )


def _block(kind: type[DFlashNet]) -> Callable[[str, SlotBackend], TargetHead]:
    """Loads a head of the DFlash family."""
    return lambda source, target: DFlashBackend(source, target, kind)


def _mtp(parts: DrafterContext, argument: str) -> Drafter:
    """The target's own prediction layers, or those of a head."""
    own = not argument or (argument.startswith("x") and argument[1:].isdecimal())  # nothing, or xK
    where, chains = ("", own_chain_count(argument)) if own else source(argument)
    target = parts.target_backend("mtp")
    with rounded_head(f"the head {where or 'of the target itself'}", parts.bits, whole=parts.whole):
        head: TargetHead = mtp_head_backend(where, target) if where else mtp_backend(target)
    return parts.head_drafter(head, "mtp", chains)


PUBLISHED = (
    _part("eagle3", "one chain from a published EAGLE-3 head (speculators' layout or SafeAILab's)", eagle3_backend),
    _part("eagle", "one chain from a published EAGLE head, of the first or second paper", eagle_backend),
    _part("medusa", "one chain from published Medusa heads, all tokens in one pass", MedusaBackend),
    _part("peagle", "one chain from a published P-EAGLE head, all tokens in one pass", PEagleBackend),
    _part("dflash", "one chain from a published DFlash head, all tokens in one pass", DFlashBackend),
    _part(
        "dspark",
        "one chain from a published DSpark head, in one pass and a small correction a token",
        _block(DSparkNet),
    ),
    _part(
        "dflash2", "one chain from a published DFlash 2 head, in one pass and a selection a token", _block(DFlash2Net)
    ),
    _part("assistant", "one chain from a Gemma 4 assistant, over the target's keys and values", AssistantBackend),
    DrafterPart(
        name="mtp",
        argument="HEAD",
        about="one chain from the target's own prediction layers, or from a published head for it (mtp:HEAD)",
        make=_mtp,
        traits=HEAD,
        branches=has_several_chains,
        chains=own_chain_count,
    ),
)
