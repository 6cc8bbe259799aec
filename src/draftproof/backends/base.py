"""The contract between the engine and a model: sessions, feeds, outputs, and `unread`, the only rollback.

Knows: which tokens a model has read, and in which shape. Does not know: how a model computes, or what for.

A session is a stem (a chain of tokens) and, between a verification and the next commit, a tail of tree nodes below the
stem's last token. `keep` is the only undo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.hidden_states import HiddenStates
from draftproof.backends.model_info import ModelInfo
from draftproof.tree import TokenTree


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; the engine's constructor refuses compositions that need more.

    Attributes:
        trees: whether drafted nodes may branch (tree attention).
        hidden: width of the last hidden state it can return, 0 when it cannot.
        ragged: whether rows that begin or end at different positions may share a forward pass.
        rollback: whether drafted tokens can be read and taken back; without it there is plain decoding only.
        portions: whether a prompt takes no longer in chunks than at once.
        resumes: whether a prompt after a prefix that was read before has the same logits as one that is read at once.
        predicts: whether it predicts, before a token is drawn, if that token will be accepted.
    """

    trees: bool = True
    hidden: int = 0
    ragged: bool = True
    rollback: bool = True
    portions: bool = True
    resumes: bool = True
    predicts: bool = False


class Session:
    """The tokens of one sequence that a model has read, in the order of their slots.

    Subclasses that hold a cache implement `_gather` and `close`.

    Attributes:
        cache_salt: only a request with the same one may take over what was read (`backends.cache.prefix_cache`).
    """

    cache_salt = ""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._fresh: list[Tensor] = []  # read after `_tokens`
        self._parents: list[int] = []
        self._length = 0
        self._ahead: list[int] = []  # accepted tokens that must be read again, whose states are still there
        self._states: dict[tuple[int, ...], HiddenStates] = {}

    @property
    def tokens(self) -> list[int]:
        """Token ids read so far, slot by slot; tokens on an accelerator are copied when first needed."""
        if self._fresh:
            where = self._fresh[-1].device
            self._tokens.extend(torch.cat([part.to(where) for part in self._fresh]).tolist())
            self._fresh.clear()
        return self._tokens

    @property
    def length(self) -> int:
        """Number of slots in use: stem and tail."""
        return self._length

    @property
    def stem(self) -> int:
        """Number of leading slots that form the chain."""
        return self._length - len(self._parents)

    @property
    def tail(self) -> tuple[int, ...]:
        """Parents of the tree nodes after the stem; -1 is the stem's last token."""
        return tuple(self._parents)

    def admit(self, chain: int, tree: TokenTree | None = None) -> None:
        """Check that a chain of this length, then a tree below it, can be read now (called by backends before reading).

        Raises:
            ValueError: nothing to read, a chain below a tree, a tree below nothing, a piece of another tree.
        """
        nodes = 0 if tree is None else len(tree)
        if not chain + nodes:
            raise ValueError("a feed without tokens")
        if chain and self._parents:
            raise ValueError("a session with a tree at its end cannot be continued by a chain: call keep first")
        if nodes and not chain + self.stem:
            raise ValueError("a tree hangs below a token: an empty session must read a chain first")
        if tree is not None and nodes and tree.known != len(self._parents):
            raise ValueError(
                f"a tree that continues {tree.known} nodes came after {len(self._parents)}: call keep first"
            )

    def read(self, chain: Sequence[int] | Int[Tensor, " tokens"], tree: TokenTree | None = None) -> None:
        """Record that the model has read a chain, then a tree below it (called by backends)."""
        if isinstance(chain, Tensor):
            self.admit(size := chain.shape[0], tree)
            self._fresh.append(chain)
        else:
            self.admit(size := len(chain), tree)
            if size:
                self.tokens.extend(chain)
        self._length += size
        if tree is not None and (nodes := len(tree)):
            self._fresh.append(tree.tokens)
            self._length += nodes
            self._parents.extend(tree.parents)
        self._ahead.clear()

    @property
    def states(self) -> Float[Tensor, "slots dim"] | None:
        """Last hidden state of every slot, in the order of `tokens`; None where the backend records none."""
        return self.states_of(())

    @property
    def records(self) -> bool:
        """Whether `states` are recorded."""
        return self.records_of(())

    def records_of(self, layers: tuple[int, ...]) -> bool:
        """Whether the hidden states of these layers are recorded; those after the last one for ()."""
        return layers in self._states

    def recorded(self, layers: tuple[int, ...]) -> int:
        """Of how many leading tokens the hidden states of these layers are there.

        Those are the tokens of the stem, and accepted tokens after it that must be read again (`keep`).
        """
        return self.stem + len(self._ahead) if self.records_of(layers) else 0

    def states_of(self, layers: tuple[int, ...]) -> Float[Tensor, "slots dim"] | None:
        """Hidden states of these layers side by side, of every slot; None where the backend does not record them."""
        found = self._states.get(layers)
        return None if found is None else found.first(self._length)

    def states_at(self, slots: Sequence[int], layers: tuple[int, ...] = ()) -> Float[Tensor, "slots dim"]:
        """States of some slots that are in use or `recorded`; a view where the slots are consecutive."""
        states = self._states[layers].first(self._length + len(self._ahead))
        first, last = slots[0], slots[-1]
        neighbours = last - first + 1 == len(slots) and list(slots) == list(range(first, last + 1))
        return states[first : last + 1] if neighbours else states[list(slots)]

    def remember(self, states: Float[Tensor, "tokens dim"], layers: tuple[int, ...] = ()) -> None:
        """Record hidden states of the tokens of the next `read` (called by backends, before `read`).

        A session that has read tokens without recording them never has states.

        Args:
            states: of the layers, side by side.
            layers: which; () for the states after the last layer and its norm.
        """
        if layers not in self._states:
            if self._length:
                return
            self._states[layers] = HiddenStates()
        self._states[layers].add(self._length, states)

    def keep(self, base: int, nodes: Sequence[int] = ()) -> int:
        """Forget every slot but [0, base) and the tail nodes `nodes`, which become the end of the stem.

        A session that cannot go back to any length keeps a shorter beginning: what is missing must be read again. The
        hidden states of the missing tokens stay until the next `read`, which makes the same ones again.

        Args:
            base: slots of the stem to keep; must be the whole stem when nodes are given.
            nodes: tail nodes along one path from the stem's end downwards.

        Returns:
            How many slots are kept: base and nodes, or fewer.

        Raises:
            ValueError: base outside the stem, or nodes that are no such path.
        """
        stem = self.stem
        if not 0 <= base <= stem:
            raise ValueError(f"keep: expected 0 to {stem}, the length of the stem, got {base}")
        if nodes and base != stem:
            raise ValueError(f"keep({base}, nodes): nodes hang below the stem's last token, so base must be {stem}")
        above = -1
        for node in nodes:
            if not 0 <= node < len(self._parents) or self._parents[node] != above:
                raise ValueError(f"keep: {list(nodes)} is no path through the tail with parents {self._parents}")
            above = node
        kept = self._reachable(base + len(nodes))
        if min(base, kept) == self._length:
            return kept
        tokens = self.tokens
        slots = [stem + node for node in nodes]
        if slots != list(range(base, base + len(slots))):
            self._gather(base, slots[: max(kept - base, 0)])
            self._gather_states(base, slots)
        tokens[base:] = [tokens[slot] for slot in slots]  # in place: tens of thousands may stand before them
        self._ahead = tokens[kept:] if self._states else []
        del tokens[kept:]
        self._parents.clear()
        self._length = kept
        return kept

    def expect(self, tokens: Sequence[int]) -> None:
        """Say which tokens come after the stem, so that no state of another token stays (called by `unread`)."""
        del self._ahead[common_prefix(self._ahead, tokens) :]

    def reach(self, length: int) -> int:
        """How many slots `keep(length)` would keep, for a length within the stem; changes nothing."""
        return length

    def _reachable(self, length: int) -> int:
        """The largest number of slots, `length` at most, that the session can go back to; it goes there now."""
        return length

    def _gather(self, base: int, slots: Sequence[int]) -> None:
        """Move the contents of `slots` to base, base + 1, ...; without a cache there is nothing to move."""

    def _gather_states(self, base: int, slots: Sequence[int]) -> None:
        for states in self._states.values():
            states.move(base, slots)

    def fork(self, length: int) -> Session | None:
        """A session of its own that begins with a copy of this one's first slots; None where that is not possible.

        Args:
            length: slots, a number that `reach` returned.
        """
        made = self._empty()
        if made is not None:
            made._tokens = self.tokens[:length]  # noqa: SLF001 - of this class
            made._length = length  # noqa: SLF001
            made._states = {layers: states.copy(length) for layers, states in self._states.items()}  # noqa: SLF001
        return made

    def _empty(self) -> Session | None:
        """A session of the same model for `fork`."""
        return Session()

    @property
    def nbytes(self) -> int:
        """Memory that the session takes, in bytes."""
        return sum(states.nbytes for states in self._states.values())

    def trim(self) -> None:
        """Give back the memory of what is not in use; a session without a tail only."""
        self._ahead.clear()
        for states in self._states.values():
            states.trim(self._length)

    def close(self) -> None:
        """Release the session's memory; the session must not be used again."""


@dataclass(frozen=True, eq=False)
class Feed:
    """The input of one session in a forward pass: pending tokens as a chain, then drafted nodes below them.

    Attributes:
        session: the session that reads.
        tokens: chain tokens to append to the stem, a list of integers or a tensor.
        tree: nodes to append to the tail: a whole tree, or the rest of a tree whose first `known` nodes are the tail.
    """

    session: Session
    tokens: Sequence[int] | Int[Tensor, " tokens"]
    tree: TokenTree | None = None

    def __len__(self) -> int:
        return len(self.tokens) + (0 if self.tree is None else len(self.tree))


@dataclass(frozen=True, eq=False)
class FeedOutput:
    """The output for one feed: a row for the last chain token (if any was fed), then one for each node.

    Attributes:
        logits: untransformed, in the model's dtype.
        hidden: last hidden states of the same positions, where requested.
        ids: the token of each column of the logits, ascending, for a model over a part of the vocabulary; other tokens
            have probability 0. None: column i is token i.
        accepted: for a model that `predicts`, the probability with which the next token is accepted, whichever it is.
    """

    logits: Float[Tensor, "rows width"]
    hidden: Float[Tensor, "rows dim"] | None = None
    ids: Int[Tensor, " width"] | None = None
    accepted: Float[Tensor, " rows"] | None = None


@runtime_checkable
class Backend(Protocol):
    """A model that reads tokens into sessions."""

    @property
    def name(self) -> str:
        """Its name in errors and reports."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Longest sequence it can read; None when unbounded."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its logits."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def open(self) -> Session:
        """A fresh, empty session."""
        ...

    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed, of any lengths, and return the output of each.

        With `hidden`, outputs include the last hidden states.
        """
        ...


# --- what a backend may say besides: attributes with a default, read here and nowhere else ---------------------------


def rounding(backend: Backend) -> str:
    """Why the last digits of a token's logits may depend on the other tokens of a pass; empty where they cannot.

    A backend says so in an attribute `rounding`: empty if it sums every row in one order, so that a chain's logits are
    the same bits alone, in every batch and in every draft. One without the attribute is not known to do that.
    """
    found: str = getattr(backend, "rounding", f"{backend.name} does not say that it sums every row in one order")
    return found


def own_threads(backend: Backend) -> bool:
    """Whether its products run on the C library's threads, by its attribute `own_threads`; else they run on torch's."""
    found: bool = getattr(backend, "own_threads", False)
    return found


def why_bounded(backend: Backend) -> str:
    """Why a backend reads less than its model's context, by its attribute `bounded_by`; empty without a reason."""
    found: str = getattr(backend, "bounded_by", "")
    return found


def why_plain(backend: Backend) -> str:
    """Why a backend without `rollback` has none, by its attribute `because`; empty without a reason."""
    found: str = getattr(backend, "because", "")
    return found


def info(backend: Backend) -> ModelInfo | None:
    """Sizes and number format of a backend's model, by its attribute `facts`; None where it has none."""
    found: ModelInfo | None = getattr(backend, "facts", None)
    return found


def kind(backend: Backend) -> str:
    """Which forward pass it has, by its attribute `kind`; the name of its class where it does not say."""
    found: str = getattr(backend, "kind", type(backend).__name__)
    return found


def products(backend: Backend) -> str:
    """How its linear layers are computed, by its attribute `products`; empty where it does not say."""
    found: str = getattr(backend, "products", "")
    return found


def dtype(backend: Backend) -> torch.dtype | None:
    """The number format of its weights, by its attribute `dtype`; None where it does not say."""
    found: torch.dtype | None = getattr(backend, "dtype", None)
    return found


def architectures(backend: Backend) -> Sequence[str]:
    """Names of its model's classes, by the configuration of its attribute `model`; empty where there is none."""
    config = getattr(getattr(backend, "model", None), "config", None)
    return list(getattr(config, "architectures", None) or [])


def room(backend: Backend, tokens: Sequence[int], *, vocab_size: int, edits: bool) -> int | None:
    """How many drafted tokens a draft model can read after some; None when unbounded, 0 where it cannot read these.

    A backend whose tokens take more than a position each counts itself, in a method `room(tokens, edits=...)`.

    Args:
        backend: of the draft model.
        tokens: of a text.
        vocab_size: of the target; the draft model's may be smaller by padding.
        edits: whether logits are changed before the draw, so that any token may be drawn, also one to which the draft
            model gives no probability.
    """
    own: Callable[..., int | None] | None = getattr(backend, "room", None)
    if own is not None:
        return own(tokens, edits=edits)
    if backend.vocab_size < vocab_size and max(tokens) >= backend.vocab_size:
        return 0
    return None if backend.max_positions is None else backend.max_positions - len(tokens)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix; if one is a prefix of the other, a single comparison finds it."""
    known, size = 0, min(len(left), len(right))
    if _first(left, size) == _first(right, size):
        return size
    while known + 1 < size:  # the first `known` are equal, the first `size` are not
        middle = (known + size) // 2
        if left[known:middle] == right[known:middle]:
            known = middle
        else:
            size = middle
    return known


def _first(tokens: Sequence[int], size: int) -> Sequence[int]:
    """The first `size` tokens; not a copy where these are all."""
    return tokens if len(tokens) == size else tokens[:size]


def unread(session: Session, tokens: list[int]) -> list[int]:
    """Roll a session back to its common prefix with `tokens`; return the unread rest, at least the last token.

    Rollback, prefix reuse, a drafter's catch-up and recovery after an exception are this one call; no counters.

    Raises:
        ValueError: no tokens.
    """
    if not tokens:
        raise ValueError("nothing to read: a sequence has at least one token")
    stem = session.stem
    known = min(common_prefix(_first(session.tokens, stem), tokens), len(tokens) - 1)
    path = _walk(session, tokens[known:-1]) if known == stem else []
    rest = tokens[session.keep(known, path) :]
    session.expect(rest)
    return rest


def logits_along(backend: Backend, prompt: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "rows vocab"]:
    """Logits after a prompt and after each of the tokens that follow it, of one pass in a session of its own."""
    return outputs_along(backend, [prompt], [tokens])[0].logits


def outputs_along(
    backend: Backend, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], *, hidden: bool = False
) -> list[FeedOutput]:
    """Outputs after each prompt and each token of the text that follows it, of one pass in sessions of its own."""
    sessions = [backend.open() for _ in prompts]
    try:
        trees = [TokenTree.chain(torch.tensor(list(text), device=backend.device)) if text else None for text in texts]
        feeds = [Feed(*each) for each in zip(sessions, map(list, prompts), trees, strict=True)]
        return backend.forward(feeds, hidden=hidden)
    finally:
        for session in sessions:
            session.close()


def _walk(session: Session, tokens: Sequence[int]) -> list[int]:
    """The path of tail nodes, from the stem downwards, whose tokens are the beginning of `tokens`."""
    stem, ids = session.stem, session.tokens
    path: list[int] = []
    for node, parent in enumerate(session.tail):
        if len(path) < len(tokens) and parent == (path[-1] if path else -1) and ids[stem + node] == tokens[len(path)]:
            path.append(node)
    return path
