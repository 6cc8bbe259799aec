"""The base class of published networks that run lean layers of their own over pairs of a token and a state."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.heads.base import HeadBackend, HeadNet
from draftproof.backends.heads.published.files import HeadFiles, read_head
from draftproof.backends.heads.published.layers import Passes
from draftproof.backends.lean.attention import Pass


class PublishedNet(HeadNet):
    """The network of a published head.

    Args:
        files: of the head; what is read is taken out of its tensors.

    Raises:
        UserError: made for another model, weights that do not fit the config, or parts that are not read here.
    """

    algorithm: ClassVar[str]
    _passes: Passes

    @abstractmethod
    def __init__(self, files: HeadFiles, target: SlotBackend) -> None: ...

    @classmethod
    def load(cls, source: str, target: SlotBackend) -> HeadBackend:
        """A head over the target it was made for."""
        files = read_head(source, cls.algorithm)
        net = cls(files, target)
        files.refuse_left()
        return HeadBackend(target, net, f"{cls.algorithm} head {source}", back=0)

    def __call__(
        self,
        states: Float[Tensor, "rows width dim"],
        embedded: Float[Tensor, "rows width dim"],
        layout: Layout,
        cache: SlotCache,
    ) -> Float[Tensor, "rows width dim"]:
        """See `HeadNet`."""
        at, masks = self._passes(states, layout, cache)
        return self._run(states.flatten(0, 1), embedded.flatten(0, 1), at, masks).view(states.shape)

    @abstractmethod
    def _run(
        self, x: Float[Tensor, "tokens dim"], embedded: Float[Tensor, "tokens dim"], at: Pass, masks: dict[str, Any]
    ) -> Float[Tensor, "tokens dim"]:
        """The states after the tokens."""
