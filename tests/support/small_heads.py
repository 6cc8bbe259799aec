"""Heads over several states of a target, random or trained for a moment, for tests of their training."""

import pytest
import torch
from safetensors.torch import load_file

from draftproof.backends.heads.feature_net import FeatureConfig
from draftproof.training.eagle3_net import Eagle3Module, save_eagle3
from draftproof.training.feature_head import make_feature_head
from draftproof.training.feature_options import FeatureJob
from draftproof.training.feature_rows import FeatureStore
from draftproof.training.loop import TrainingPlan

WORDS = ["The little dog saw a big red ball.", "It ran and ran to get it.", "Then it was sad, and mom said: go home!"]


def random_net(layers, *, own_output=False, ids=40, make=Eagle3Module, **more):
    """A head with random weights for a target of width 32 and 97 tokens."""
    config = FeatureConfig("llama", 32, 97, 4, 2, 24, ids, own_output=own_output, window=64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = make(config, layers, **more)
        for weight in net.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    net.ids.copy_(torch.arange(ids) * 2)
    return net.requires_grad_(requires_grad=False)


def write(net, target, folder):
    """Its directory."""
    folder.mkdir()
    save_eagle3(
        net,
        folder,
        embedding=target.model.get_input_embeddings().weight.detach(),
        output=target.output_rows(net.ids),
        architectures=["LlamaForCausalLM"],
        max_positions=64,
        dtype=torch.float32,
    )
    return str(folder)


def write_texts(tmp_path):
    """A file of texts that repeat."""
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(f"{WORDS[i % 3]} {WORDS[(i // 3) % 3]} Number {i}." for i in range(400)))
    return file


def job(tmp_path, texts, name, **options):
    """A training of some steps for the embedded stories model."""
    plan = TrainingPlan(steps=40, seed=3, log_every=10, evaluate_every=40, save_every=10, learning_rate=3e-3)
    kept = {"windows": 24, "length": 16, "ids": 200, "trial_prompts": 1, "dtype": "float32", "cache": tmp_path / "c"}
    options = {**kept, "format": "eagle3", **options}
    return FeatureJob("embedded:stories", tmp_path / name, plan, (texts,), **options)


def whole_and_interrupted(whole, cut, monkeypatch, at):
    """The weights of a training job, and of a like one that was interrupted at a batch, and continued."""
    make_feature_head(whole)
    calls, kept = [], FeatureStore.batch

    def dying(self, step, size, seed):
        calls.append(step)
        if step == at and calls.count(at) == 1:
            raise KeyboardInterrupt
        return kept(self, step, size, seed)

    monkeypatch.setattr(FeatureStore, "batch", dying)
    with pytest.raises(KeyboardInterrupt):
        make_feature_head(cut)
    make_feature_head(cut)
    assert calls.count(0) == 1, "the second run continued the first"
    return [load_file(each.out / "model.safetensors") for each in (whole, cut)]
