"""Reference outputs of the package `speculators` for the prediction layers of Qwen3-Next and Qwen3.5 checkpoints.

It runs in an environment of its own, as make_head_references.py. Every layer is random and tiny, and is written under
the names of the published checkpoints (`mtp.*`): `reference.safetensors` holds them with the embedding, the output
layer, random hidden states and the logits of the first step at every token. Later steps are others in the package: it
reads the whole text at every step, as it trains. `head` has the config of a head that drafts three
tokens, and their logits.

    TORCHDYNAMO_DISABLE=1 python scripts/made_once/make_mtp_references.py tests/support/data/mtp_qwen
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import AutoConfig

IDS = [3, 17, 5, 29, 8, 30, 11, 2, 39, 21, 14, 6]
STEPS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
MODELS = {"qwen3_next": EXPERTS, "qwen3_5_text": {}, "qwen3_5_moe_text": EXPERTS}
NAMES = {
    "input_proj": "mtp.fc",
    "final_layernorm": "mtp.norm",
    "hidden_layernorm": "mtp.pre_fc_norm_hidden",
    "token_layernorm": "mtp.pre_fc_norm_embedding",
}


def published(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor of the package under the names of the checkpoints; experts are one tensor each there."""
    part, _, rest = name.removeprefix("mtp_layers.0.").partition(".")
    if part in NAMES:
        return {f"{NAMES[part]}.{rest}": value}
    at = f"mtp.layers.0.{part}."
    if rest == "experts.gate_up_proj":
        halves = {"gate_proj": 0, "up_proj": 1}
        return {
            f"{at}experts.{number}.{half}.weight": each.chunk(2)[place]
            for number, each in enumerate(value)
            for half, place in halves.items()
        }
    if rest == "experts.down_proj":
        return {f"{at}experts.{number}.down_proj.weight": each for number, each in enumerate(value)}
    return {f"{at}{rest}": value}


def make(name: str, seed: int, out: Path) -> None:
    """One layer and its logits."""
    config = AutoConfig.for_model(name, **SHAPE, **MODELS[name])
    config._attn_implementation = "eager"  # noqa: SLF001
    proposal = SpeculatorsConfig(
        algorithm="mtp",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    model: Any = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=config, speculators_config=proposal))
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            size = 0.3 if weight.ndim == 1 else 1.5 * weight.shape[-1] ** -0.5  # norms are stored without their 1
            weight.copy_(torch.randn(weight.shape, generator=source) * size)
        states = torch.randn(1, len(IDS), SHAPE["hidden_size"], generator=source)
        logits = model.eval()(input_ids=torch.tensor([IDS]), hidden_states=states)[0][0][0]
        proposal.proposal_methods[0].speculative_tokens = STEPS
        steps = torch.stack([each[0] for each in model(input_ids=torch.tensor([IDS]), hidden_states=states)[0]])
    tensors = {
        "states": states[0],
        "logits": logits,
        "embed": model.embed_tokens.weight,
        "lm_head": model.lm_head.weight,
    }
    for key, value in model.state_dict().items():
        if key.startswith("mtp_layers."):
            tensors |= published(key, value)
    (out / name).mkdir(parents=True, exist_ok=True)
    kept = {key: value.detach().contiguous() for key, value in tensors.items()}
    save_file(kept, out / name / "reference.safetensors")
    model.config.save_pretrained(out / name / "head")
    (out / name / "head" / "config.py").unlink()  # the package's code, which nobody needs here
    save_file({"logits": steps.contiguous()}, out / name / "head" / "steps.safetensors")
    (out / name / "config.json").write_text(json.dumps({"model_type": name, **SHAPE, **MODELS[name]}, indent=2) + "\n")


def main() -> None:
    """Write everything."""
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    for seed, name in enumerate(MODELS, 50):
        make(name, seed, out)
    made_with = {package: version(package) for package in ("torch", "transformers", "speculators", "safetensors")}
    record = {"made_by": "scripts/made_once/make_mtp_references.py", "made_with": made_with, "tokens": IDS}
    (out / "provenance.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
