"""Layers with the gated delta rule whose last digits do not depend on the number of tokens, in our passes.

Transformers' layers compute decays and betas, a few numbers for a token, by functions of torch that have other last
digits for numbers that are left over from a vector. Elsewhere these layers do what they did.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from draftproof.backends.recurrent.even import evenly
from draftproof.backends.recurrent.recurrences import current_pass, names_of

_CLASSES: dict[type, type] = {}


def follow_evenly(layer: Any) -> None:
    """Let a layer with the gated delta rule (of Qwen3-Next or Qwen3.5) compute evenly in our passes."""
    own = type(layer)
    if own not in _CLASSES:
        _CLASSES[own] = type(own.__name__, (_DeltaNet, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    layer.__class__ = _CLASSES[own]


class _DeltaNet(nn.Module):
    """The layer's forward pass; everything else is of transformers' class."""

    in_proj_qkv: Any
    in_proj_z: Any
    in_proj_b: Any
    in_proj_a: Any
    in_proj_qkvz: Any
    in_proj_ba: Any
    fix_query_key_value_ordering: Any
    conv1d: Any
    norm: Any
    out_proj: Any
    A_log: Any
    dt_bias: Any
    activation: str
    layer_idx: int
    key_dim: int
    value_dim: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The layer's outputs [rows, tokens, dim]."""
        if current_pass() is None or cache_params is None or attention_mask is not None:
            made: Tensor = super().forward(
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **options
            )
            return made
        rows, tokens, _ = hidden_states.shape
        names = names_of(super().forward)
        mixed, z, b, a = self._projected(hidden_states)
        state = cache_params.unchanged_recurrent_state(self.layer_idx)
        every = cache_params.update_conv_state(
            mixed.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size
        )
        convolved = names["causal_conv1d_fn"](every, self.conv1d.weight.squeeze(1), None, activation=self.activation)
        convolved = convolved[:, :, -tokens:].transpose(1, 2)
        parts = convolved.split([self.key_dim, self.key_dim, self.value_dim], -1)
        sizes = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
        query, key, value = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
        steps = evenly(a.float() + self.dt_bias, F.softplus)
        out, end = names["torch_chunk_gated_delta_rule"](
            query,
            key,
            value,
            g=-self.A_log.float().exp() * steps,
            beta=evenly(b, torch.sigmoid),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        cache_params.update_recurrent_state(end, self.layer_idx)
        normed = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        output: Tensor = self.out_proj(normed.reshape(rows, tokens, -1))
        return output

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, gates, and what betas and decays are made of."""
        if "in_proj_qkv" in self._modules:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        query, key, value, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return torch.cat([each.flatten(2) for each in (query, key, value)], -1), z, b, a
