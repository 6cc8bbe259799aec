"""The draft model of a drafter: one session for each request, and rows of q as wide as the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from draftproof import native
from draftproof.backends.base import Backend, Feed, Session, room, unread
from draftproof.backends.cache.prefix_cache import PrefixCache
from draftproof.drafters.base import DraftRequest, SessionDrafter
from draftproof.errors import UserError, blamed_on
from draftproof.sampling import LogitsCheck, SamplingParams, Transforms, probabilities, shaped
from draftproof.stoppers.base import Outlook, RoundTime, Stopper

_UNLIKELY = -1e4  # stands for -inf


class DraftModel:
    """A draft model with the sessions and transforms of all requests.

    Args:
        backend: the model; its vocabulary may be padded to another width than the target's.
        vocab_size: width of the target's logits and of q.
        temperature, top_k: for the draft; None for the request's values.
    """

    stationary = True

    def __init__(
        self, backend: Backend, *, vocab_size: int, temperature: float | None = None, top_k: int | None = None
    ) -> None:
        self.backend = backend
        self._vocab_size = vocab_size
        changes = {"temperature": temperature, "top_k": top_k}
        # the sampling parameters in which the draft differs from the request
        self.changes: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
        try:
            SamplingParams(**self.changes)
        except UserError as cause:
            raise UserError(f"the draft's own {cause}") from None
        # Checks of the logits. A drafter calls `finish` at the end of drafting, which waits for the draft model's
        # passes on a device, so that the host's clock measures the time of drafting.
        self.checks = LogitsCheck()
        self.prefix_cache = PrefixCache(0)
        self._sessions: dict[int, Session] = {}
        self._transforms: dict[int, Transforms] = {}

    @property
    def full_vocabulary(self) -> bool:
        """Whether every token id of the target is a token id of the draft model."""
        return self.backend.vocab_size >= self._vocab_size

    def session(self, request: DraftRequest) -> Session:
        """The request's session for a round; the first call also fixes the request's sampling parameters."""
        if request.id not in self._transforms:
            own = replace(request.transforms.params, **self.changes)
            self._transforms[request.id] = replace(request.transforms, params=own)
        return self.open(request)

    def open(self, request: DraftRequest) -> Session:
        """The request's session, which lasts from round to round."""
        if request.id not in self._sessions:
            running = list(self._sessions.values())
            self._sessions[request.id] = self.prefix_cache.open(
                self.backend, request.tokens, running, request.cache_salt
            )
        return self._sessions[request.id]

    def unread(self, session: Session, request: DraftRequest) -> list[int]:
        """Roll the request's session back to its committed tokens; return the tokens that it has not read."""
        return unread(session, request.tokens)

    def outlook(self, request: DraftRequest) -> Outlook:
        """What is known of the request before a round; a prefix that could be reused counts as unread."""
        session = self._sessions.get(request.id)
        read = 0 if session is None else session.length
        return Outlook(
            max(len(request.tokens) - 1 - read, 0), request.limit, len(request.tokens) == request.prompt_length
        )

    def read(self, requests: Sequence[DraftRequest]) -> None:
        """Read all tokens of these requests but the last; see `SessionDrafter`."""
        feeds = []
        for request in requests:
            if self.depth(replace(request, limit=1), 1):
                session = self.session(request)
                if len(left := self.unread(session, request)) > 1:
                    feeds.append(Feed(session, left[:-1]))
        if feeds:
            self.backend.forward(feeds)

    def ended(self, request_id: int, tokens: list[int]) -> None:
        """Put the request's session into the prefix cache."""
        session = self._sessions.pop(request_id, None)
        if session is not None:
            self.prefix_cache.keep(self.backend, session, tokens)

    def depth(self, request: DraftRequest, limit: int) -> int:
        """Largest depth of a draft, limited by the request, by `limit` and by the model's context.

        It is 0 if a token of the request has no embedding in the model, whose vocabulary may be smaller than the
        target's by padding.
        """
        edits = request.transforms.edits
        most = room(self.backend, request.tokens, vocab_size=self._vocab_size, edits=edits)
        return max(min(request.limit, limit, limit if most is None else most), 0)

    def path_dependent(self, request: DraftRequest) -> bool:
        """Whether a transform makes q depend on the drafted path, so that the host needs its token ids."""
        return self._transforms[request.id].path_dependent

    def rows(
        self,
        request: DraftRequest,
        logits: Float[Tensor, "rows width"],
        paths: Sequence[Sequence[int]],
        ids: Int[Tensor, " width"] | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Rows of q after the given drafted paths, as wide as the target's vocabulary.

        Paths are only used if q is `path_dependent`. `ids` are the tokens of the columns of `logits`, if these are not
        the whole vocabulary; see `draftproof.backends.base.FeedOutput`.

        Raises:
            RequestError: logits with NaN, +inf or a row without a finite value; on an accelerator, `checks` raises it.
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
        columns = None if transforms.edits else ids  # without edits, the transforms need only these columns
        fitted = fit_width(logits, self._vocab_size, ids) if columns is None else logits
        self.checks.add(request.id, fitted, f"the drafter ({self.backend.name})")
        if columns is not None:
            narrow = shaped(fitted.to(torch.promote_types(fitted.dtype, torch.float32)), transforms.params)
            return native.spread(narrow, columns, self._vocab_size)
        if ids is not None or transforms.constraint is not None:  # edits may leave none of the drafter's own tokens
            fitted = fitted.clamp(min=_UNLIKELY)
        outputs = request.tokens[request.prompt_length :] if transforms.path_dependent else []
        return probabilities(fitted, transforms, outputs, paths)

    def release(self, request_id: int) -> None:
        """Close the request's session."""
        session = self._sessions.pop(request_id, None)
        self._transforms.pop(request_id, None)
        if session is not None:
            session.close()


class ModelBacked(SessionDrafter):
    """Base class of drafters that draw from a draft model, with a stopper that decides how long drafts get."""

    point_masses = False
    reads_predictions = False

    def __init__(self, model: DraftModel, stopper: Stopper) -> None:
        refuse_incompatible(stopper, model.backend)
        self.model = model
        self.stopper = stopper

    @property
    def constant(self) -> bool:
        """Whether the stopper is constant, and the model has all tokens and the same q after the same text."""
        return self.stopper.constant and self.model.full_vocabulary and self.model.stationary

    @property
    def timed(self) -> bool:
        """Whether the stopper learns from a clock."""
        return self.stopper.timed

    @property
    def limit(self) -> int:
        """The stopper's limit."""
        return self.stopper.limit

    @property
    def most(self) -> int:
        """Largest number of drafts of a row."""
        return 1

    @property
    def max_positions(self) -> int | None:
        """The draft model's context."""
        return self.model.backend.max_positions

    @property
    def backends(self) -> Sequence[Backend]:
        """The draft model."""
        return (self.model.backend,)

    @override
    def reuse(self, kept: PrefixCache) -> None:
        self.model.prefix_cache = kept

    @override
    def read(self, parts: Sequence[DraftRequest]) -> None:
        if self.stopper.reads_ahead:
            self.model.read(parts)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start a round: tell the stopper which requests are in it, and what is known of them."""
        self.stopper.expect({request.id: self.model.outlook(request) for request in requests})
        self.stopper.begin([request.id for request in requests], self.most)

    @override
    def ended(self, request_id: int, tokens: list[int]) -> None:
        self.model.ended(request_id, tokens)

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Pass the outcome to the stopper."""
        self.stopper.observe(request_id, drafted, accepted)

    def spent(self, time: RoundTime) -> None:
        """Pass the time to the stopper."""
        self.stopper.spent(time)

    def release(self, request_id: int) -> None:
        """Close the request's session, and release it in the stopper."""
        self.stopper.release(request_id)
        self.model.release(request_id)


def refuse_incompatible(stopper: Stopper, backend: Backend) -> None:
    """Refuse a stopper that needs predictions that the model does not make, or hidden states of another width."""
    if stopper.reads_predictions and not backend.capabilities.predicts:
        raise UserError(
            f"stopper {stopper.name} needs a draft head that predicts acceptance, but {backend.name} does not: use a "
            "dspark head that does, or another stopper"
        )
    needed, width = stopper.hidden_size, backend.capabilities.hidden
    if not needed or needed == width:
        return
    if not width:
        raise UserError(
            f"stopper {stopper.name} reads hidden states, but {backend.name} returns none: choose a stopper without a "
            "head"
        )
    maker = getattr(stopper, "trained_on", None)
    raise UserError(
        f"stopper {stopper.name} reads hidden states of width {needed}"
        f"{f' (its head was trained on {maker})' if maker else ''}, but those of {backend.name} have {width}: "
        "choose a head that was trained on this draft model"
    )


def fit_width(
    logits: Float[Tensor, "rows width"], width: int, ids: Int[Tensor, " width"] | None = None
) -> Float[Tensor, "rows vocab"]:
    """Rows of logits as wide as the target's vocabulary; tokens that the drafter lacks get probability 0.

    Vocabularies that differ only by padding have the same ids for all real tokens; tokenizers are compared when models
    are loaded. `ids` is as in `DraftModel.rows`.
    """
    if ids is not None:
        return logits.new_full((logits.shape[0], width), float("-inf")).index_copy_(1, ids, logits)
    if logits.shape[-1] >= width:
        return logits[:, :width]
    return pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))


def stack_rows(rows: list[Tensor]) -> Tensor | None:
    """The rows as one tensor; None without rows."""
    return torch.stack(rows) if rows else None
