"""A draft model as drafters use it: one session a request, rows of q at the target's width, a stopper.

Knows: sessions by request, how logits become q, what a stopper may ask of a model. Does not know: chains, trees.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from draftproof.backends.base import Backend, Session
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.errors import UserError, blamed_on
from draftproof.kernels import native
from draftproof.sampling import SamplingParams, Transforms, check_logits, probabilities, shaped
from draftproof.stoppers.base import Stopper


class DraftModel:
    """Sessions and transforms of the requests that a draft model serves.

    Args:
        backend: the model; its vocabulary may be padded to another width than the target's.
        vocab_size: width of the target's logits; q has this width.
        temperature: of the draft, when it shall differ from the request's.
        top_k: of the draft, when it shall differ from the request's.

    Attributes:
        changes: what the draft's sampling has that the request's has not.

    Raises:
        UserError: a temperature or top_k out of range.
    """

    def __init__(
        self, backend: Backend, *, vocab_size: int, temperature: float | None = None, top_k: int | None = None
    ) -> None:
        self.backend = backend
        self._vocab_size = vocab_size
        changes = {"temperature": temperature, "top_k": top_k}
        self.changes: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
        try:
            SamplingParams(**self.changes)
        except UserError as cause:
            raise UserError(f"the draft's own {cause}") from None
        self._sessions: dict[int, Session] = {}
        self._transforms: dict[int, Transforms] = {}

    @property
    def covers(self) -> bool:
        """Whether every id of the target's vocabulary is one of the draft's."""
        return self.backend.vocab_size >= self._vocab_size

    def session(self, request: DraftRequest) -> Session:
        """The request's session for a round; its sampling parameters are bound at the first."""
        if request.id not in self._transforms:
            own = replace(request.transforms.params, **self.changes)
            self._transforms[request.id] = replace(request.transforms, params=own)
        return self.open(request)

    def open(self, request: DraftRequest) -> Session:
        """A session of the request's own that is kept from round to round."""
        if request.id not in self._sessions:
            self._sessions[request.id] = self.backend.open()
        return self._sessions[request.id]

    def depth(self, request: DraftRequest, limit: int) -> int:
        """How deep a draft may go: the request's wish, the stopper's limit, and where the model's context ends.

        0 also after a token that the model has no embedding for: its vocabulary may be padded less than the target's.
        """
        if self.backend.vocab_size < self._vocab_size and max(request.tokens) >= self.backend.vocab_size:
            return 0
        most = self.backend.max_positions
        room = limit if most is None else most - len(request.tokens)
        return max(min(request.limit, limit, room), 0)

    def path_dependent(self, request: DraftRequest) -> bool:
        """Whether q depends on the drafted path through a transform, so that ids must be on the host."""
        return self._transforms[request.id].path_dependent

    def rows(
        self,
        request: DraftRequest,
        logits: Float[Tensor, "rows width"],
        paths: Sequence[Sequence[int]],
        ids: Int[Tensor, " width"] | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Rows of q after the given drafted paths: logits through the request's transforms, at the target's width.

        Args:
            request: whose they are.
            logits: the model's.
            paths: for each row; not looked at unless q is `path_dependent`.
            ids: the tokens of the logits' columns; see `Output`.
        """
        with blamed_on(request.id):
            return self._rows(request, logits, paths, ids)

    def _rows(
        self,
        request: DraftRequest,
        logits: Float[Tensor, "rows width"],
        paths: Sequence[Sequence[int]],
        ids: Int[Tensor, " width"] | None,
    ) -> Float[Tensor, "rows vocab"]:
        transforms = self._transforms[request.id]
        apart = None if transforms.edits else ids  # tokens it does not speak of stay out of all but the result
        fitted = fit_width(logits, self._vocab_size, ids) if apart is None else logits
        check_logits(fitted, f"the drafter ({self.backend.name})")
        if apart is not None:
            narrow = shaped(fitted.to(torch.promote_types(fitted.dtype, torch.float32)), transforms.params)
            return native.spread(narrow, apart, self._vocab_size)
        outputs = request.tokens[request.prompt_length :] if transforms.path_dependent else []
        return probabilities(fitted, transforms, outputs, paths)

    def release(self, request_id: int) -> None:
        """Close the request's session."""
        session = self._sessions.pop(request_id, None)
        self._transforms.pop(request_id, None)
        if session is not None:
            session.close()


class ModelBacked:
    """What drafters that draw from a draft model have in common.

    Args:
        model: the draft model.
        stopper: when a chain ends.

    Raises:
        UserError: the stopper reads hidden states that the model does not have.
    """

    point_masses = False

    def __init__(self, model: DraftModel, stopper: Stopper) -> None:
        refuse_misfit(stopper, model.backend)
        self.model = model
        self.stopper = stopper

    def with_stopper(self, stopper: Stopper) -> Drafter:
        """The same drafter, on the same model, with another stopper."""
        made: Any = copy.copy(self)
        made.stopper = stopper
        drafter: Drafter = made
        return drafter

    @property
    def constant(self) -> bool:
        """As constant as its stopper, if the model knows every token: it cannot draft after one that it does not."""
        return self.stopper.constant and self.model.covers

    @property
    def limit(self) -> int:
        """As deep as its stopper lets it."""
        return self.stopper.limit

    @property
    def most(self) -> int:
        """Drafts that a row can get."""
        return 1

    @property
    def max_positions(self) -> int | None:
        """The draft model's context."""
        return self.model.backend.max_positions

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Passed on to the stopper."""
        self.stopper.observe(request_id, drafted, accepted)

    def release(self, request_id: int) -> None:
        """Close the request's session."""
        self.stopper.release(request_id)
        self.model.release(request_id)


def refuse_misfit(stopper: Stopper, backend: Backend) -> None:
    """Refuse a stopper that reads hidden states of another width than the model's.

    Raises:
        UserError: naming stopper, what it was trained on, model and widths.
    """
    wanted, there = stopper.hidden_size, backend.capabilities.hidden
    if not wanted or wanted == there:
        return
    if not there:
        raise UserError(f"stopper {stopper.name} reads hidden states, and {backend.name} returns none")
    maker = getattr(stopper, "trained_on", None)
    raise UserError(
        f"stopper {stopper.name} reads hidden states of width {wanted}"
        f"{f' (its head was trained on {maker})' if maker else ''}, and those of {backend.name} have {there}: "
        "choose a head that was trained on this draft model"
    )


def fit_width(
    logits: Float[Tensor, "rows width"], width: int, ids: Int[Tensor, " width"] | None = None
) -> Float[Tensor, "rows vocab"]:
    """Rows of logits at the target's width; tokens the drafter does not have get probability 0.

    Vocabularies that differ by padding only agree on every real token; tokenizers are compared when models are loaded.

    Args:
        logits: the drafter's.
        width: of the target's.
        ids: the tokens of the logits' columns; see `Output`.
    """
    if ids is not None:
        return logits.new_full((logits.shape[0], width), float("-inf")).index_copy_(1, ids, logits)
    if logits.shape[-1] >= width:
        return logits[:, :width]
    return pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))


def stack_rows(rows: list[Float[Tensor, " _"]]) -> Float[Tensor, "rows _"] | None:
    """Rows as one tensor; None for no rows."""
    return torch.stack(rows) if rows else None
