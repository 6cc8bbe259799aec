"""The configurations that are checked: every model type with its own defaults, and variants of many."""

from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.architectures.variants import VARIANTS

DEFAULT = "default"


@dataclass(frozen=True)
class Configuration:
    """A model type with changes to its tiny configuration."""

    model_type: str
    variant: str = DEFAULT
    changes: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self):
        """Type and variant."""
        return self.model_type if self.variant == DEFAULT else f"{self.model_type}, {self.variant}"


def configurations():
    """Every model type as it is by default, each followed by its variants."""
    made = []
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        made.append(Configuration(model_type))
        made.extend(Configuration(model_type, *variant) for variant in VARIANTS.get(model_type, {}).items())
    return made
