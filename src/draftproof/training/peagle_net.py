"""The network of a P-EAGLE head while it is trained: an EAGLE-3 head that drafts all tokens in one pass.

After the known tokens come masked places. They all read one mask token, and one learned vector in place of the target's
states; each sees the known tokens and the masked places before it. The unrolled steps of the loss are these places, so
nothing is drafted in training and every place is learnt at every position of a text.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.heads.feature_net import FeatureConfig
from draftproof.training.eagle3_net import Eagle3Module


class PEagleModule(Eagle3Module):
    """A P-EAGLE head with one layer.

    Args:
        config, layers: as `Eagle3Module`.
        mask_token: the token that masked places read, one that no draft continues; its embedding is not trained.
        places: number of tokens that the head drafts.
    """

    algorithm, architecture = "peagle", "PEagleSpeculator"

    def __init__(self, config: FeatureConfig, layers: tuple[int, ...], *, mask_token: int, places: int) -> None:
        super().__init__(config, layers)
        self.mask_token = mask_token
        self.places = places
        self.mask_hidden = nn.Parameter(torch.randn(len(layers) * config.hidden_size))

    @override
    def carried(self, out: Float[Tensor, "rows width dim"], ids: Int[Tensor, "rows width"]) -> tuple[Tensor, Tensor]:
        """What every masked place reads."""
        mask: Tensor = self.fc(self.mask_hidden)
        return mask.to(out.dtype).expand_as(out), torch.full_like(ids, self.mask_token)

    @override
    def own_config(self) -> dict[str, int]:
        return {"mask_token_id": self.mask_token}

    @override
    def own_tensors(self) -> dict[str, Tensor]:
        return {"mask_hidden": self.mask_hidden.data.view(1, 1, -1)}
