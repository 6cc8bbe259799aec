"""Heads: small trained networks that read a draft model's hidden state and predict whether a token will be accepted.

A head is a directory with `config.json` and `model.safetensors`. It belongs to one draft model, whose hidden states it
reads; its config names this model.

There are three kinds. Each gives one number for a drafted token y with target probability p and draft probability q:
- acceptance: Pr(y is accepted), the sigmoid of the output, from the hidden state at y (SpecDec++, arXiv 2405.19715,
  section 3.2);
- log_ratio: log(p/q), the output, from the hidden state at y; for block verification;
- verifier: Pr(q <= lambda p), the sigmoid of the output, from the hidden state before y, which y was drawn from
  (SPRINTER, arXiv 2502.04557, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from draftproof.errors import UserError, reason, refuse_unknown
from draftproof.files import read_object, write_json

KINDS = ("acceptance", "log_ratio", "verifier")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 1
_Network = TypeVar("_Network", bound=nn.Module)


@dataclass(frozen=True)
class HeadConfig:
    """Kind and shape of a head, and the models it was trained for."""

    kind: str  # acceptance, log_ratio or verifier
    hidden_size: int  # width of the draft model's last hidden state
    draft: str  # the draft model it was trained on
    target: str  # the target model that its labels came from
    depth: int = 3  # residual blocks before the output layer; 0 is a linear head
    shared_blocks: bool = False  # whether all blocks share one set of weights, as in the published code of SpecDec++
    reads_draw: bool = False  # whether log q(y) is a further input; verifiers only
    threshold: float = 0.5  # the default threshold of its stopper; each stopper defines its meaning

    def __post_init__(self) -> None:
        refuse_unknown("kind of a head", self.kind, KINDS)
        if self.hidden_size < 1 or not 0 <= self.depth <= 64:
            raise UserError(
                f"head: expected a width of 1 or more and a depth of 0 to 64, got {self.hidden_size} and {self.depth}"
            )
        if self.reads_draw and self.kind != "verifier":
            raise UserError(
                f"a head of kind {self.kind} reads the state at the token, so it cannot also read its draw: reads_draw "
                "is for kind verifier only"
            )


class Head(nn.Module):
    """A residual network with SiLU blocks and one output; a linear layer at depth 0.

    Source: SpecDec++, arXiv 2405.19715, section 4.1; the linear head is that of SPRINTER, arXiv 2502.04557.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        made = 1 if config.shared_blocks and config.depth else config.depth
        blocks = [nn.Linear(width, width) for _ in range(made)]
        for block in blocks:  # each block starts as the identity
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(width + config.reads_draw, 1)

    def forward(
        self, hidden: Float[Tensor, "*rows dim"], log_q: Float[Tensor, "*rows"] | None = None
    ) -> Float[Tensor, "*rows"]:
        """The output before the sigmoid, in float32; heads with `reads_draw` get `log_q` of the drawn tokens."""
        x = hidden.float()
        for place in range(self.config.depth):
            block = self.blocks[0 if self.config.shared_blocks else place]
            x = x + silu(block(x))
        if self.config.reads_draw:
            assert log_q is not None, "this head reads the draw"
            x = torch.cat([x, log_q.float().clamp(min=-20).unsqueeze(-1)], -1)
        made: Tensor = self.out(x).squeeze(-1)
        return made


def save_head(head: Head, directory: Path) -> None:
    """Write the head's config and weights into an existing directory."""
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, directory / WEIGHTS)
    write_json(directory / CONFIG, {"format": FORMAT, **asdict(head.config)})


def load_head(directory: str | Path) -> Head:
    """Read a head from its directory."""
    return load_network(directory, HeadConfig, Head, "head", format=FORMAT)


def load_network(
    directory: str | Path, of: type[Any], network: Callable[[Any], _Network], what: str, **stated: object
) -> _Network:
    """Read a trained network from its directory, in eval mode.

    Args:
        directory: with a config and weights.
        of: dataclass of the config's fields.
        network: makes it from the config.
        what: its name in errors, and in the command that trains it.
        stated: what the config says besides, such as a format.
    """
    where = Path(directory).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (where / name).is_file():
            raise UserError(
                f"no {what} in {str(where)!r} ({name} is missing): expected a directory made by `draftproof train "
                f"{what.replace(' ', '-')}`"
            )
    found = read_object(where / CONFIG, f"the config of a {what}")
    said = {name: found.pop(name, None) for name in stated}
    known = {each.name: each.default is MISSING for each in fields(of)}
    if said != stated or not {name for name, needed in known.items() if needed} <= set(found) <= known.keys():
        raise UserError(f"{str(where / CONFIG)!r} is not the config of a {what} of format {stated['format']}")
    made = network(of(**found))
    try:
        made.load_state_dict(load_file(where / WEIGHTS))
    except Exception as cause:
        raise UserError(f"the weights of the {what} {str(where)!r} do not fit its config: {reason(cause)}") from cause
    return made.requires_grad_(requires_grad=False).eval()
