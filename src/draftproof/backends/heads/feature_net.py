"""The network of a feature head: its shape, its weights, its files.

It is one transformer layer. The input at token t is the target's last hidden state at t - 1 and the embedding of t. The
output predicts the target's state at t; the target's own output layer, restricted to the tokens `ids`, computes logits
from it (EAGLE, arXiv 2401.15077).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from draftproof.errors import UserError
from draftproof.files import write_json
from draftproof.heads import CONFIG, WEIGHTS, load_network

FORMAT = 1
EPS = 1e-5  # of every norm
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # rotated queries, keys and values [rows heads width dim] -> mixed


@dataclass(frozen=True)
class FeatureConfig:
    """The shape of a feature head, and its target."""

    target: str
    hidden_size: int
    vocab_size: int
    # heads, key_heads: of the attention; key_heads divides heads, heads divides hidden_size
    heads: int
    key_heads: int
    inner_size: int
    ids: int  # number of tokens it can draft; others have probability 0, which lowers acceptance and not exactness
    own_output: bool = False  # whether it has an output layer of its own instead of these rows of the target's
    window: int = 256  # number of last tokens it attends to
    rope_theta: float = 10000.0
    layers: int | None = None  # of the target; None in heads of earlier versions, which do not say

    def __post_init__(self) -> None:
        sizes = (self.hidden_size, self.heads, self.key_heads, self.inner_size, self.window)
        if min(sizes) < 1 or self.hidden_size % (2 * self.heads) or self.heads % self.key_heads:
            raise UserError(
                f"a feature head of width {self.hidden_size} with {self.heads} heads on {self.key_heads} key heads, "
                f"inner width {self.inner_size} and window {self.window}: all must be 1 or more, key heads divide "
                "heads, and twice the heads divide the width"
            )
        if not 1 <= self.ids <= self.vocab_size:
            raise UserError(
                f"tokens of a feature head: expected 1 to {self.vocab_size}, the vocabulary, got {self.ids}"
            )


class HeadModule(nn.Module):
    """A head of one Llama-shaped layer while it is trained."""

    ids: Int[Tensor, " ids"]
    first_place = 0  # the first token of a text that it reads; here the very first, with zeros before it

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.heads

    def _add_output(self) -> None:
        """Make the output layer, if there is one of its own; after all others, which are drawn first."""
        config = self.config
        self.output = nn.Linear(config.hidden_size, config.ids, bias=False) if config.own_output else None
        self.register_buffer("ids", torch.arange(config.ids))

    def entered(
        self,
        states: Float[Tensor, "rows width dim"],
        features: Float[Tensor, "rows width inner"] | None,  # noqa: ARG002 - for others
    ) -> Float[Tensor, "rows width dim"]:
        """The target's states in the form of its own, which is the same."""
        return states

    def carried(self, out: Float[Tensor, "rows width dim"], ids: Int[Tensor, "rows width"]) -> tuple[Tensor, Tensor]:
        """The states and token ids that the next step of a draft reads: its own output, and the text."""
        return out, ids

    def predicted(self, out: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """What the output layer reads, which is its output."""
        return out

    def rotary(self, positions: Int[Tensor, "rows width"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, for every head."""
        cos, sin = rotary(self.config, positions, next(self.parameters()).dtype)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _heads(self, x: Float[Tensor, "rows width _"]) -> Float[Tensor, "rows heads width dim"]:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    @staticmethod
    def _norm(weight: Tensor, x: Tensor) -> Tensor:
        return rms_norm(x.to(weight.dtype), weight.shape, weight, EPS)


class FeatureNet(HeadModule):
    """One Llama-shaped layer between two normalised inputs and a normalised output."""

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__(config)
        width, inner = config.hidden_size, config.inner_size
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(5)])
        self.fuse = nn.Linear(2 * width, width, bias=False)
        self.queries = nn.Linear(width, width, bias=False)
        self.keys_values = nn.Linear(width, 2 * config.key_heads * self.head_dim, bias=False)
        self.mixed = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self._add_output()

    def forward(
        self,
        states: Float[Tensor, "rows width dim"],
        embedded: Float[Tensor, "rows width dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Float[Tensor, "rows width dim"]:
        """The predicted target states at the tokens, from those before them.

        `rotary` are angles of the tokens' positions. `attend` reads this pass's rotated queries, keys and values, and
        any cache.
        """
        of_states, of_tokens, before, between, last = self.norms
        x = self.fuse(torch.cat([self._norm(of_states, states), self._norm(of_tokens, embedded)], -1))
        h = self._norm(before, x)
        queries = rotate(self._heads(self.queries(h)), rotary)
        keys, values = self.keys_values(h).chunk(2, -1)
        found = attend(queries, rotate(self._heads(keys), rotary), self._heads(values))
        x = x + self.mixed(found.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self._norm(between, x)).chunk(2, -1)
        return self._norm(last, x + self.down(silu(gate) * up))


def rotary(
    config: FeatureConfig, positions: Int[Tensor, "rows width"], dtype: torch.dtype
) -> tuple[Float[Tensor, "rows width half"], Float[Tensor, "rows width half"]]:
    """Cosines and sines by which the two halves of a head are rotated."""
    dim = config.hidden_size // config.heads
    half = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angles = positions.float().unsqueeze(-1) * config.rope_theta**-half
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Float[Tensor, "rows heads width dim"], rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the two halves of each head against each other, as Llama does."""
    (left, right), (cos, sin) = x.chunk(2, -1), rotary
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def save_net(net: FeatureNet, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a feature head's two files into an existing directory, its weights in `dtype`."""
    tensors = {
        name: tensor.to(dtype if tensor.is_floating_point() else torch.int32).contiguous()
        for name, tensor in net.state_dict().items()
    }
    save_file(tensors, directory / WEIGHTS)
    write_json(directory / CONFIG, {"kind": "feature_head", "format": FORMAT, **asdict(net.config)})


def load_net(directory: str | Path) -> FeatureNet:
    """Read a feature head from its directory, in float32."""
    net = load_network(directory, FeatureConfig, FeatureNet, "feature head", kind="feature_head", format=FORMAT)
    ids = net.ids.tolist()
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= net.config.vocab_size:
        raise UserError(
            f"the feature head {str(directory)!r} names tokens out of order, twice or outside its vocabulary"
        )
    return net
