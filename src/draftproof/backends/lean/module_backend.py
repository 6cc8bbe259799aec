"""Backend lean over the modules of a transformers model whose layers differ from one another, as Gemma 4's.

Weights stay those of the model: its modules multiply with them, too, and make forms of it with few bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.windows import Windows, windows_of
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.native_modules import MOST_ROWS
from draftproof.backends.lean.hybrid import HybridLean, family_of
from draftproof.backends.lean.inputs import UnitError
from draftproof.backends.lean.traits import UnreadError
from draftproof.errors import UserError

_log = logging.getLogger(__name__)


class ReadByLean(HFBackend):
    """A transformers model that is read by a lean forward over its modules, where that is possible.

    Attributes:
        lean: the forward pass; None where transformers' own modules make it.
    """

    lean: HybridLean | None = None
    _unread = ""  # why there is no lean forward

    def _multiply_natively(self) -> None:
        super()._multiply_natively()
        self._read_lean()

    def _read_lean(self) -> None:
        """Read the model as it is now by a lean forward, where that is possible."""
        self.lean = None
        try:
            self.lean = self._lean_of(self._windows)
        except UnreadError as cause:
            self._unread = str(cause)
            _log.info("%s is read by transformers' own modules: %s", self.name, cause)
        self.packs = self.lean is not None
        self.own_threads |= self.packs

    def _lean_of(self, windows: Windows) -> HybridLean:
        return HybridLean(self.model, windows)

    @property
    @override
    def rounding(self) -> str:
        return super().rounding + f" ({self._unread})" if self.lean is None else self.lean.rounding

    @override
    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> HFBackend:
        """What was made of the weights is made again."""
        made = super().with_weights(weights)
        assert isinstance(made, ReadByLean), "a copy of this one"
        made._read_lean()  # noqa: SLF001 - of this class
        return made

    def _with_model(self, model: Any) -> HFBackend:
        made = super()._with_model(model)
        assert isinstance(made, ReadByLean), "a copy of this one"
        made._read_lean()  # noqa: SLF001 - of this class
        return made


class LeanModulesBackend(ReadByLean):
    """Such a model without recurrent layers; arguments as of HFBackend.

    Where a processor's matrix unit multiplies many rows faster than native code multiplies with weights where they are,
    passes of many tokens are left to transformers' own modules.

    Raises:
        UserError: as of HFBackend, or a model that the lean forward does not read.
    """

    kind = "lean"
    _few = False  # whether the lean forward reads passes of few tokens only

    @override
    def _read_lean(self) -> None:
        super()._read_lean()
        if self.lean is None:
            raise UserError(f"{self.name} has no lean forward: {self._unread}; use backend hf or auto")
        self.packs = not self._few

    @override
    def _lean_of(self, windows: Windows) -> HybridLean:
        try:
            made = HybridLean(self.model, windows)
        except UnitError:
            self._few = True
            return HybridLean(self.model, windows, few=True)
        self._few = False
        return made

    @property
    @override
    def rounding(self) -> str:
        if not self._few:
            return super().rounding
        return (
            f"passes of more than {MOST_ROWS} tokens use the processor's matrix unit, whose sums depend on the rows of "
            "a pass"
        )

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        if self.lean is None or (self._few and layout.ids.numel() > MOST_ROWS):
            return super()._compute(layout, hidden=hidden)
        return self.lean(layout, self._cache, hidden=hidden)


def why_unread(model: Any) -> str | None:
    """Why `LeanModulesBackend` does not read a model; None where it does."""
    try:
        family_of(model)  # before a pass of the model
        HybridLean(model, windows_of(model), few=True)
    except UnreadError as cause:
        return str(cause)
    return None
