"""Gemma 4 assistants: heads without keys and values of their own, which read those of the target.

An assistant reads pairs of a token and the state before it, as other heads do. Its layers have queries only. They
attend to what the target's last layer of the same kind (sliding or full) holds of the tokens that the target has read.
So every token of a draft has the position of the last committed one, and sees others by the state before it only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention
from typing_extensions import override

from draftproof.backends import base as backends
from draftproof.backends.base import Feed, FeedOutput, Session
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import HeadSession, TargetHead
from draftproof.backends.heads.published.files import HeadFiles, cast, read_head, refuse_other_target
from draftproof.backends.heads.published.layers import LayerShape, make_norm, make_product
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.errors import UserError

_FAMILIES = ("gemma4_text", "gemma4_unified_text")
_SLIDING, _GATE = "sliding_attention", "gelu_pytorch_tanh"


class Past(NamedTuple):
    """What the rows of a sequence attend to."""

    rows: int
    slot: int
    length: int


class _Layer:
    """One layer.

    Args:
        source: number of the target's layer whose keys and values it reads.
    """

    def __init__(self, files: HeadFiles, shape: LayerShape, number: int, source: int, target: SlotBackend) -> None:
        at, size, config = f"model.layers.{number}.", shape.size, shape.config
        self.kind = config.layer_types[number]  # of its attention
        self._source = source
        self._dim = int(config.per_layer_config[number].head_dim)
        self._window = shape.windows[number]
        inner = shape.heads * self._dim
        self._query = make_product(files, f"{at}self_attn.q_proj", inner, size, target)
        self._turned = make_norm(files, shape, f"{at}self_attn.q_norm", target, self._dim)
        self._out = make_product(files, f"{at}self_attn.o_proj", size, inner, target)
        self._gate = make_product(files, f"{at}mlp.gate_proj", shape.inner, size, target)
        self._up = make_product(files, f"{at}mlp.up_proj", shape.inner, size, target)
        self._down = make_product(files, f"{at}mlp.down_proj", size, shape.inner, target)
        self._before = make_norm(files, shape, f"{at}input_layernorm", target)
        self._mixed = make_norm(files, shape, f"{at}post_attention_layernorm", target)
        self._between = make_norm(files, shape, f"{at}pre_feedforward_layernorm", target)
        self._made = make_norm(files, shape, f"{at}post_feedforward_layernorm", target)
        self._scale = cast(files.take(f"{at}layer_scalar", [1]), target)

    def __call__(
        self, x: Float[Tensor, "rows dim"], turn: tuple[Tensor, Tensor], pasts: Sequence[Past], target: SlotBackend
    ) -> Float[Tensor, "rows dim"]:
        queries = self._turned(self._query(self._before(x)).view(len(x), -1, self._dim))
        cosine, sine = (each.unsqueeze(1) for each in turn)
        left, right = queries.chunk(2, -1)
        queries = queries * cosine + torch.cat([-right, left], -1) * sine
        parts = torch.split(queries, [past.rows for past in pasts])
        attended = [self._attended(part, past, target) for part, past in zip(parts, pasts, strict=True)]
        x = x + self._mixed(self._out(torch.cat(attended)))
        normed = self._between(x)
        x = x + self._made(self._down(gelu(self._gate(normed), approximate="tanh") * self._up(normed)))
        return x * self._scale

    def _attended(
        self, queries: Float[Tensor, "rows heads dim"], past: Past, target: SlotBackend
    ) -> Float[Tensor, "rows inner"]:
        views = target.cache.views(past.slot, 1)
        assert views is not None, "the target has read something"
        first = 0 if self._window is None else max(past.length - self._window - 1, 0)  # transformers' window of a draft
        keys, values = (each[self._source][:, :, first : past.length].to(queries.dtype) for each in views)
        made = scaled_dot_product_attention(queries.transpose(0, 1)[None], keys, values, scale=1.0, enable_gqa=True)
        return made[0].transpose(0, 1).flatten(1)


class AssistantNet:
    """The network of an assistant."""

    def __init__(self, files: HeadFiles, target: HFBackend) -> None:
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

        shape = _shape(files)
        config, vocab = shape.config, shape.vocab
        self._target = target
        self.width = files.number("backbone_hidden_size")  # of the states that it reads and passes on, the target's
        refuse_other_target(files, target, hidden=self.width, vocab=vocab)
        sources = _sources(files, config, target)
        self._enter = make_product(files, "pre_projection", shape.size, 2 * self.width, target)
        self._layers = [
            _Layer(files, shape, number, sources[kind], target) for number, kind in enumerate(config.layer_types)
        ]
        self._norm = make_norm(files, shape, "model.norm", target)
        self._leave = make_product(files, "post_projection", self.width, shape.size, target)
        self._rope = Gemma4TextRotaryEmbedding(config).to(target.device)
        self._table = cast(files.take("model.embed_tokens.weight", [vocab, shape.size]), target)
        files.ignore("lm_head.weight")
        self._clusters: PackedLinear | None = None
        if files.config.get("use_ordered_embeddings"):
            count = files.number("num_centroids")
            self._kept = files.number("centroid_intermediate_top_k")
            if vocab % count or self._kept > count:
                raise files.refused(
                    f"has num_centroids {count} and centroid_intermediate_top_k "
                    f"{self._kept}: expected a divisor of {vocab}, its vocabulary, and at most num_centroids"
                )
            self._clusters = make_product(files, "masked_embedding.centroids", count, shape.size, target)
            self._members = _members(files, vocab, count).to(target.device)
        else:
            self._output = PackedLinear(self._table)

    def __call__(
        self,
        tokens: Int[Tensor, " rows"],
        states: Float[Tensor, "rows width"],
        positions: Int[Tensor, " rows"],
        pasts: Sequence[Past],
    ) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows width"]]:
        """Logits of the next tokens, and the states that are passed on.

        Positions are those of the last committed tokens.
        """
        x = self._enter(torch.cat([self._target.embed(tokens).to(states.dtype), states], -1))
        turns = {kind: self._rope(x, positions, kind) for kind in {layer.kind for layer in self._layers}}
        for layer in self._layers:
            x = layer(x, turns[layer.kind], pasts, self._target)
        x = self._norm(x)
        return self._logits(x), self._leave(x)

    def _logits(self, x: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows vocab"]:
        """Of all tokens, or of those in the nearest clusters; the others get -inf."""
        if self._clusters is None:
            return self._output(x)
        nearest = self._clusters(x).topk(self._kept, -1).indices
        members = self._members[nearest].flatten(1)
        found = torch.stack([linear(row, self._table[ids]) for row, ids in zip(x, members, strict=True)])
        return found.new_full((len(x), len(self._table)), float("-inf")).scatter_(-1, members, found)


def _shape(files: HeadFiles) -> LayerShape:
    given = files.config.get("text_config") or {}
    config = files.made(given.get("model_type"), _FAMILIES, given)
    if config.hidden_activation != _GATE:
        raise files.refused(f"has the activation {config.hidden_activation!r}: expected {_GATE}")
    windows = tuple(int(config.sliding_window) if kind == _SLIDING else None for kind in config.layer_types)
    first, sizes = config.per_layer_config[0], (config.hidden_size, config.intermediate_size)
    size, inner, heads, keys, dim, vocab = (
        int(number)
        for number in (*sizes, config.num_attention_heads, first.num_key_value_heads, first.head_dim, config.vocab_size)
    )
    return LayerShape(size, inner, heads, keys, dim, float(config.rms_norm_eps), vocab, windows, config)


def _sources(files: HeadFiles, config: Any, target: HFBackend) -> dict[str, int]:
    """For each kind of layer, the target's last one that has keys and values of its own."""
    theirs = target.config
    if theirs.model_type != config.model_type:
        raise files.refused(
            f"reads keys and values of {config.model_type}, and {target.name} is "
            f"{theirs.model_type}: take an assistant that was made for this target"
        )
    own = theirs.layer_types[: theirs.num_hidden_layers - (theirs.num_kv_shared_layers or 0)]
    found = {kind: number for number, kind in enumerate(own)}
    for number, kind in enumerate(config.layer_types):
        dim = config.per_layer_config[number].head_dim
        if kind not in found or theirs.per_layer_config[found[kind]].head_dim != dim:
            raise files.refused(
                f"reads keys of {dim} numbers of a layer of kind {kind}, and "
                f"{target.name} has none: take an assistant that was made for this target"
            )
    return found


def _members(files: HeadFiles, vocab: int, count: int) -> Int[Tensor, "clusters tokens"]:
    order = files.take("masked_embedding.token_ordering", [vocab]).long()
    if not torch.equal(order.sort().values, torch.arange(vocab)):
        raise UserError(f"masked_embedding.token_ordering of the assistant {files.source!r} is no order of all tokens")
    return order.view(count, -1)


class AssistantSession(HeadSession):
    """The tokens of a request, and the states of this round.

    Args:
        owner: the target's session; this one leaves out its first token.
    """

    def __init__(self, owner: Session) -> None:
        super().__init__()
        self.owner = owner
        self.root = 0  # number of tokens that were read before the draft
        # the states after the last committed token and after each drafted one; None before the first feed of a round
        self.made: list[Tensor] | None = None

    def rewind(self) -> None:
        """Forget the states of the last round, and what was drafted."""
        self.made = None
        self.keep(min(self.root, self.stem))

    def above(self, feed: Feed) -> list[Tensor]:
        """The states before the tokens of a feed, which must be drafted ones of one level."""
        assert self.made is not None, "there is a draft"
        before = self.stem - self.root
        parents = () if feed.tree is None else feed.tree.parents
        places = [before] * len(feed.tokens) + [before + 1 + parent for parent in parents]
        if len(feed.tokens) > 1 or max(places) >= len(self.made) or (len(feed.tokens) and feed.tree is not None):
            raise ValueError("an assistant reads drafted tokens level by level")
        return [self.made[place] for place in places]


class AssistantBackend(TargetHead):
    """An assistant over the target it was made for."""

    def __init__(self, source: str, target: SlotBackend) -> None:
        files = read_head(source, "assistant")
        if not (isinstance(target, HFBackend) and target.whole_keys):
            family = " or ".join(backends.architectures(target)) or "another model"
            raise UserError(
                f"the assistant {source!r} reads the keys and values of a Gemma 4 target, and {target.name} is "
                f"{family} on backend {backends.kind(target)}: use a Gemma 4 target in one process, on backend lean or "
                "hf, without kv_dtype int8"
            )
        self._net = AssistantNet(files, target)
        files.refuse_left()
        self._target = target
        super().__init__(target, f"assistant {source}", width=self._net.width)

    @override
    def follow(self, owner: Session) -> AssistantSession:
        return AssistantSession(owner)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read committed tokens, of which only the last one is computed, or drafted tokens of one level.

        Raises:
            ValueError: nothing to read, drafted tokens of several levels, or keys that the target does not hold.
        """
        tokens, states, pasts = [], [], []
        sessions = [feed.session for feed in feeds if isinstance(feed.session, AssistantSession)]
        assert len(sessions) == len(feeds), "an assistant reads sessions of its own"
        for session, feed in zip(sessions, feeds, strict=True):
            session.admit(len(feed.tokens), feed.tree)
            if session.made is None:
                if feed.tree is not None:
                    raise ValueError("an assistant reads committed tokens before drafted ones")
                session.read(feed.tokens)
                session.root = session.stem
                session.made = []
                above = [session.owner.states_at([session.root - 1])[0]]
            else:
                above = session.above(feed)
                session.read(feed.tokens, feed.tree)
            owner = session.owner
            if not isinstance(owner, SlotSession) or owner.stem < session.root:
                raise ValueError("an assistant drafts after the target has read all but the last token")
            tokens += session.tokens[session.length - len(above) :]
            states += above
            pasts.append(Past(len(above), owner.slot, session.root))
        positions = [past.length for past in pasts for _ in range(past.rows)]
        with self._target.cache.lock:
            logits, made = self._net(
                torch.tensor(tokens, device=self.device),
                torch.stack(states).to(self.device, self._target.dtype),
                torch.tensor(positions, device=self.device),
                pasts,
            )
        outputs = []
        counts = [past.rows for past in pasts]
        for session, row, state in zip(sessions, torch.split(logits, counts), torch.split(made, counts), strict=True):
            assert session.made is not None, "begun before"
            session.made += list(state)
            outputs.append(FeedOutput(row, state if hidden else None))
        return outputs
