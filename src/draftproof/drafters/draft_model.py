"""A draft model as drafters use it: one session a request, and rows of q at the target's width.

Knows: sessions by request, how logits become q. Does not know: chains, trees, when to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from draftproof.backends.base import Backend, Session
from draftproof.drafters.base import DraftRequest
from draftproof.errors import UserError
from draftproof.sampling import SamplingParams, Transforms, check_logits, probabilities


class DraftModel:
    """Sessions and transforms of the requests that a draft model serves.

    Args:
        backend: the model; its vocabulary may be padded to another width than the target's.
        vocab_size: width of the target's logits; q has this width.
        temperature: of the draft, when it shall differ from the request's.
        top_k: of the draft, when it shall differ from the request's.

    Raises:
        UserError: a temperature or top_k out of range.
    """

    def __init__(
        self, backend: Backend, *, vocab_size: int, temperature: float | None = None, top_k: int | None = None
    ) -> None:
        self.backend = backend
        self._vocab_size = vocab_size
        changes = {"temperature": temperature, "top_k": top_k}
        self._changes: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
        try:
            SamplingParams(**self._changes)
        except UserError as cause:
            raise UserError(f"the draft's own {cause}") from None
        self._sessions: dict[int, Session] = {}
        self._transforms: dict[int, Transforms] = {}

    @property
    def covers(self) -> bool:
        """Whether every id of the target's vocabulary is one of the draft's."""
        return self.backend.vocab_size >= self._vocab_size

    def session(self, request: DraftRequest) -> Session:
        """The request's session, opened at its first round."""
        if request.id not in self._sessions:
            self._sessions[request.id] = self.backend.open()
            own = replace(request.transforms.params, **self._changes)
            self._transforms[request.id] = replace(request.transforms, params=own)
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
        self, request: DraftRequest, logits: Float[Tensor, "rows width"], paths: Sequence[Sequence[int]]
    ) -> Float[Tensor, "rows vocab"]:
        """Rows of q after the given drafted paths: logits at the target's width, through the request's transforms."""
        fitted = fit_width(logits, self._vocab_size)
        check_logits(fitted, f"the drafter's ({self.backend.name}) for request {request.id}")
        transforms = self._transforms[request.id]
        outputs = request.tokens[request.prompt_length :] if transforms.path_dependent else []
        return probabilities(fitted, transforms, outputs, paths)

    def release(self, request_id: int) -> None:
        """Close the request's session."""
        session = self._sessions.pop(request_id, None)
        self._transforms.pop(request_id, None)
        if session is not None:
            session.close()


def fit_width(logits: Float[Tensor, "rows width"], width: int) -> Float[Tensor, "rows vocab"]:
    """Cut or pad rows of logits to the target's width; tokens the drafter does not have get probability 0.

    Vocabularies that differ by padding only agree on every real token; tokenizers are compared when models are loaded.
    """
    if logits.shape[-1] >= width:
        return logits[:, :width]
    return pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
