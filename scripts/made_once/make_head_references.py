"""Reference outputs of the package `speculators` for tests of published draft heads: tests/support/data/speculators.

It runs in an environment of its own: `pip install torch==2.13.0`, then `pip install speculators==0.9.0`. Every head is
random and tiny, saved by the package itself, and read along known tokens: `reference.safetensors` holds the target's
hidden states, as transformers computes them, and the head's logits at every step of a draft from every position.

    HF_HUB_OFFLINE=1 python scripts/made_once/make_head_references.py tests/support/data/speculators
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core as dflash_core
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark import core as dspark_core
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.peagle import core as peagle
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

VOCAB, DRAFTED, WIDTH, LAYERS, STEPS = 40, 24, 16, 7, 4
TARGET = "tiny-target"
IDS = [3, 17, 5, 29, 8, 30, 11, 2, 39, 21, 14, 6]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EAGLE3 = {
    "eagle3_llama": {"layer": LlamaConfig(**SHAPE, num_hidden_layers=1), "drafted": DRAFTED},
    "eagle3_residual": {
        "layer": LlamaConfig(
            **SHAPE,
            num_hidden_layers=1,
            attention_bias=True,
            rms_norm_eps=1e-5,
            rope_parameters={**ROPE, "original_max_position_embeddings": 8},
        ),
        "drafted": DRAFTED,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, LAYERS],
    },
    "eagle3_qwen3": {
        "layer": Qwen3Config(**SHAPE, num_hidden_layers=1),
        "drafted": VOCAB,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [2, 5],
    },
    "eagle3_sliding": {
        "layer": Qwen3Config(
            **SHAPE,
            num_hidden_layers=2,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "drafted": DRAFTED,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
    },
}

SLIDING: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention"],
}
DFLASH: dict[str, dict[str, Any]] = {
    "dflash_full": {"layer": Qwen3Config(**SHAPE, num_hidden_layers=2), "drafted": DRAFTED, "layers": [1, 4, 6]},
    "dflash_sliding": {
        "layer": Qwen3Config(**SHAPE, num_hidden_layers=2, **SLIDING),
        "drafted": VOCAB,
        "layers": [0, 3],
    },
    "dflash_anchor": {
        "layer": Qwen3Config(**SHAPE, num_hidden_layers=2, attention_bias=True, **SLIDING),
        "drafted": DRAFTED,
        "layers": [2, LAYERS],
        "sliding_window_non_causal": True,
        "sample_from_anchor": True,
    },
}
KINDRED: dict[str, dict[str, Any]] = {
    "dspark_vanilla": {
        "layer": Qwen3Config(**SHAPE, num_hidden_layers=2),
        "drafted": DRAFTED,
        "layers": [1, 4, 6],
        "markov_rank": 5,
    },
    "dspark_gated": {
        "layer": Qwen3Config(**SHAPE, num_hidden_layers=2, **SLIDING),
        "drafted": VOCAB,
        "layers": [0, 3],
        "markov_rank": 6,
        "markov_head_type": "gated",
        "confidence_head_with_markov": False,
        "sample_from_anchor": False,
    },
    "dspark_rnn": {
        "layer": Qwen3Config(**SHAPE, num_hidden_layers=1),
        "drafted": DRAFTED,
        "layers": [2, LAYERS],
        "markov_rank": 5,
        "markov_head_type": "rnn",
    },
    "dflash2_windows": {
        "layer": Qwen3Config(**SHAPE, num_hidden_layers=2, **SLIDING),
        "drafted": VOCAB,
        "layers": [0, 3],
        "conv_group_size": 4,
        "selector_rank": 5,
        "selector_top_k": 6,
    },
    "dflash2_anchor": {
        "layer": Qwen3Config(**SHAPE, num_hidden_layers=2, **SLIDING),
        "drafted": VOCAB,
        "layers": [2, 5],
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": 9,
        "sliding_window_non_causal": False,
        "sample_from_anchor": True,
    },
}


def fill(model: Any, seed: int) -> Any:
    """Random weights, large enough that a wrong mask or position changes the logits visibly."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=source) * 1.5 * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=source))
    return model.eval()


def proposal(algorithm: str, steps: int = STEPS) -> SpeculatorsConfig:
    """What the package writes of the algorithm and the verifier."""
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=TARGET, architectures=["LlamaForCausalLM"]),
    )


def target_states(model: Any) -> tuple[list[Tensor], Tensor]:
    """The hidden states after every layer, 0 before the first, without the final norm; and with it."""
    found: dict[str, Any] = {}
    handle = model.model.layers[-1].register_forward_hook(lambda _m, _i, made: found.update(last=made))
    with torch.no_grad():
        out = model(input_ids=torch.tensor([IDS]), output_hidden_states=True)
    handle.remove()
    last = found["last"] if isinstance(found["last"], torch.Tensor) else found["last"][0]
    return [*out.hidden_states[:LAYERS], last], out.hidden_states[-1]


def mapping(drafted: int) -> tuple[Tensor, Tensor]:
    """Vocabulary maps: some tokens in ascending order, as offsets and as a mask."""
    source = torch.Generator().manual_seed(3)
    ids = torch.randperm(VOCAB, generator=source)[:drafted].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return mask, ids - torch.arange(drafted)


def caught(module: Any, run: Callable[[], object]) -> list[Tensor]:
    """Outputs of a module, in the order of its calls."""
    made = []
    handle = module.register_forward_hook(lambda _m, _i, out: made.append(out.detach().clone()))
    with torch.no_grad():
        run()
    handle.remove()
    return made


def eagle3(
    name: str,
    seed: int,
    states: list[Tensor],
    out: Path,
    kind: Any = Eagle3DraftModel,
    config_class: Any = Eagle3SpeculatorConfig,
    **extra: Any,
) -> None:
    """One head, and its logits [steps, tokens, drafted] from every position."""
    options = dict(EAGLE3.get(name) or extra.pop("like"))
    layer, drafted = options.pop("layer"), options.pop("drafted")
    layer._attn_implementation = "eager"  # noqa: SLF001
    algorithm = name.partition("_")[0]
    options |= {"draft_vocab_size": drafted, "speculators_config": proposal(algorithm), **extra}
    model = fill(kind(config_class(transformer_layer_config=layer, **options)), seed)
    if drafted < VOCAB:
        model.load_vocab_mappings(*mapping(drafted))
    model.float()
    layers = options.get("eagle_aux_hidden_state_layer_ids") or [2, LAYERS // 2, LAYERS - 3]
    features = torch.cat([states[each] for each in layers], -1)[:, :-1]
    shifted = torch.tensor([IDS[1:]])
    documents = torch.zeros_like(shifted)
    model.save_pretrained(out / name)
    given = {"hidden_states": features, "input_ids": shifted, "document_ids": documents}
    if kind is Eagle3DraftModel:
        made = caught(model.lm_head, lambda: model(**given, ttt_steps=STEPS))
        logits = torch.stack([each[0] for each in made])
        save_file(
            {"logits": logits.contiguous(), "features": features[0].contiguous()}, out / name / "reference.safetensors"
        )
        return
    places = {}
    sample = peagle.generate_cod_sample_indices

    def watched(**given: Any) -> tuple[Tensor, Tensor]:
        places["anchor"], places["depth"] = sample(**given)
        return places["anchor"], places["depth"]

    peagle.generate_cod_sample_indices = watched
    last = states[-1][:, :-1]
    ratios = {"num_depths": STEPS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    loss = resolve_loss_config("ce", "eager")
    options = {"loss_mask": torch.ones_like(shifted), "loss_config": loss, **ratios}
    made = caught(model.lm_head, lambda: model(**given, verifier_last_hidden_states=last, **options))
    reference = {"logits": made[0][0], "features": features[0], **places}
    save_file({key: value.contiguous() for key, value in reference.items()}, out / name / "reference.safetensors")


def dflash(name: str, seed: int, target: Any, states: list[Tensor], out: Path) -> None:
    """A head that drafts a block in one pass, and its logits [anchors, block, drafted] from the given anchors."""
    options = dict(DFLASH.get(name) or KINDRED[name])
    algorithm = name.partition("_")[0]
    config_class, kind = {
        "dflash": (DFlashSpeculatorConfig, dflash_core.DFlashDraftModel),
        "dspark": (DSparkSpeculatorConfig, dspark_core.DSparkDraftModel),
        "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    }[algorithm]
    layer, drafted, layers = options.pop("layer"), options.pop("drafted"), options.pop("layers")
    layer._attn_implementation = "eager"  # noqa: SLF001
    first = not options.get("sample_from_anchor", algorithm == "dspark")
    config = config_class(
        transformer_layer_config=layer,
        draft_vocab_size=drafted,
        block_size=STEPS,
        mask_token_id=39,
        aux_hidden_state_layer_ids=layers,
        speculators_config=proposal(algorithm, STEPS - first),
        **options,
    )
    model = fill(kind(config), seed)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        if drafted == VOCAB:
            model.lm_head.weight.copy_(target.lm_head.weight)
        model.verifier_lm_head.weight.zero_()
    if drafted < VOCAB:
        model.load_vocab_mappings(*mapping(drafted))
    model.float().save_pretrained(out / name)
    features, ids = torch.cat([states[each] for each in layers], -1), torch.tensor([IDS])
    chosen: dict[str, Tensor] = {}
    select = dflash_core.select_anchors

    def watched(*given: Any) -> tuple[Tensor, Tensor]:
        chosen["anchor"], valid = select(*given)
        return chosen["anchor"], valid

    dflash_core.select_anchors = watched
    given = {"hidden_states": features, "input_ids": ids, "document_ids": torch.zeros_like(ids)}
    rest = {"loss_mask": torch.ones_like(ids), "verifier_last_hidden_states": states[-1], "max_anchors": len(IDS)}
    reference = {"features": features[0]}
    if algorithm == "dflash":
        loss = resolve_loss_config("ce", "eager")
        logits = caught(model.lm_head, lambda: model(**given, **rest, loss_config=loss))[0]
    elif algorithm == "dspark":
        logits, accepted = dspark_rows(model, {**given, **rest})
        reference["accepted"] = accepted[0].sigmoid().unflatten(0, (-1, STEPS))
    else:
        logits = dflash2_rows(model, {**given, **rest})
    dflash_core.select_anchors = select
    reference |= {"logits": logits[0].unflatten(0, (-1, STEPS)), "anchor": chosen["anchor"]}
    save_file({key: value.contiguous() for key, value in reference.items()}, out / name / "reference.safetensors")


def dspark_rows(model: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The corrected logits and the confidence that the package hands to its loss."""
    found: list[Tensor] = []

    def watched(
        logits: Tensor, _targets: Tensor, confidence: Tensor, *_rest: Any, **_more: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        found.extend((logits.detach(), confidence.detach()))
        return torch.zeros(()), {}

    measure = dspark_core.compute_metrics
    dspark_core.compute_metrics = watched
    with torch.no_grad():
        model(**given)
    dspark_core.compute_metrics = measure
    return found[0], found[1]


def dflash2_rows(model: Any, given: dict[str, Any]) -> Tensor:
    """Scores of the tokens that the package's selector keeps at each place, after the known token; -inf elsewhere."""
    with torch.no_grad():
        places = {**given, "position_ids": None}
        hidden, logits, _, _, blocks = model._backbone_forward(**places)  # noqa: SLF001
        before = model._predecessor_ids(given["input_ids"], blocks).reshape(1, -1)  # noqa: SLF001
        kept, scores = model.candidate_selector.select(logits, hidden, before)
    return torch.full_like(logits, float("-inf")).scatter(-1, kept, scores)


def mtp(name: str, seed: int, last: Tensor, out: Path) -> None:
    """A prediction layer of its own, and its logits [steps, tokens, vocabulary] from every position."""
    layer = Qwen3Config(**SHAPE, num_hidden_layers=LAYERS)
    layer._attn_implementation = "eager"  # noqa: SLF001
    model = fill(
        MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=proposal("mtp"))), seed
    )
    model.save_pretrained(out / name)
    made = caught(model.lm_head, lambda: model(input_ids=torch.tensor([IDS]), hidden_states=last))
    logits = torch.stack([each[0] for each in made])
    reference = {
        "logits": logits,
        "features": last[0],
        "lm_head": model.lm_head.weight,
        "embed": model.embed_tokens.weight,
    }
    save_file(
        {key: value.detach().contiguous() for key, value in reference.items()}, out / name / "reference.safetensors"
    )


def main() -> None:
    """Write everything."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    target = fill(LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=LAYERS)), 1)
    target.save_pretrained(out / "target")
    states, last = target_states(target)
    torch.manual_seed(0)
    for seed, name in enumerate(EAGLE3, 10):
        eagle3(name, seed, states, out)
    like = EAGLE3["eagle3_llama"]
    eagle3("peagle", 20, states, out, peagle.PEagleDraftModel, PEagleSpeculatorConfig, like=like, mask_token_id=39)
    mtp("mtp", 30, last, out)
    for seed, name in enumerate(DFLASH, 40):
        dflash(name, seed, target, states, out)
    for seed, name in enumerate(KINDRED, 50):
        dflash(name, seed, target, states, out)
    for copied in out.rglob("config.py"):  # the package puts its own source beside each config
        copied.unlink()
    made_with = {package: version(package) for package in ("torch", "transformers", "speculators", "safetensors")}
    script = "scripts/made_once/make_head_references.py"
    record = {"made_by": script, "made_with": made_with, "tokens": IDS, "steps": STEPS}
    (out / "provenance.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
