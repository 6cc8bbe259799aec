"""Reference outputs of Gemma 4 assistants for tests: tests/support/data/assistants.

It needs transformers 5.22: 5.23 does not build these models. Target and assistants are random and tiny.
`reference.safetensors` holds what an assistant computes along known tokens: from every position the logits of some
drafted tokens, each after the known one before it, with keys and values of the tokens before that position.

    HF_HUB_OFFLINE=1 python scripts/made_once/make_assistant_references.py tests/support/data/assistants
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
)

VOCAB, WIDTH, STEPS, WINDOW = 40, 16, 3, 4
IDS = [3, 17, 5, 29, 8, 30, 11, 2, 39, 21, 14, 6]
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = (Gemma4TextConfig, Gemma4ForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM)
UNIFIED = (
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
}
EQUAL = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
BARE = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False}
INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "enable_moe_block": False}
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 10, "centroid_intermediate_top_k": 4}
# Of each: its classes, what both have, what the target has, what the layers of the assistant have, and the assistant.
KINDS: dict[str, tuple[Any, ...]] = {
    "shared": (GEMMA, {}, {**INPUTS, "num_kv_shared_layers": 2}, BARE, ORDERED),
    "equal": (GEMMA, EQUAL, {**BARE, "num_kv_shared_layers": 0}, BARE, {}),
    "unified": (UNIFIED, EQUAL, {}, {}, {}),
}


def fill(model: Any, seed: int) -> Any:
    """Random weights, large enough that a wrong mask or position changes the logits visibly."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("token_ordering"):
                weight.copy_(torch.randperm(VOCAB, generator=source))
            elif weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=source) * 1.5 * weight.shape[-1] ** -0.5)
            elif weight.is_floating_point() and not name.endswith(("inv_freq", "embed_scale")):
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=source))
    return model.eval()


def rows(target: Any, assistant: Any, length: int) -> Tensor:
    """Logits [steps, vocabulary] of tokens that are drafted after the first `length` ones, along the known tokens."""
    read = target(torch.tensor([IDS[: length - 1]]), output_hidden_states=True, return_shared_kv_states=True)
    state, made = read.hidden_states[-1][:, -1:], []
    for step in range(STEPS):
        embedded = target.get_input_embeddings()(torch.tensor([[IDS[length - 1 + step]]]))
        out = assistant(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=torch.tensor([[length - 1]]),
            shared_kv_states=read.shared_kv_states,
        )
        state = out.last_hidden_state
        made.append(out.logits[0, -1])
    return torch.stack(made)


def main() -> None:
    """Write everything."""
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    for seed, (name, (classes, both, theirs, own, more)) in enumerate(KINDS.items(), 60):
        text_config, target_class, config_class, assistant_class = classes
        shape = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 4}
        config = text_config(**SHAPE, **both, **theirs, **shape, layer_types=[SLIDING, FULL, SLIDING, FULL])
        target = fill(target_class(config), seed)
        shape = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_kv_shared_layers": 3}
        text = text_config(**SHAPE, **both, **own, **shape, layer_types=[SLIDING, SLIDING, FULL])
        assistant = config_class(text_config=text, backbone_hidden_size=WIDTH, **more)
        assistant = fill(assistant_class(assistant), seed + 10)
        target.save_pretrained(out / name / "target")
        assistant.save_pretrained(out / name / "assistant")
        with torch.no_grad():
            logits = torch.stack([rows(target, assistant, length) for length in range(2, len(IDS) - STEPS + 2)])
        save_file({"logits": logits.contiguous()}, out / name / "reference.safetensors")
    made_with = {package: version(package) for package in ("torch", "transformers", "safetensors")}
    script = "scripts/made_once/make_assistant_references.py"
    record = {"made_by": script, "made_with": made_with, "tokens": IDS, "steps": STEPS}
    (out / "provenance.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
