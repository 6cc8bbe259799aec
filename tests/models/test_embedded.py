"""The embedded pair is what upstream published, loads as any directory does, and can be made again byte for byte."""

import functools
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftproof.embedded import draft_dir, target_dir

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "support" / "data" / "stories260K"
SCRIPT = ROOT / "scripts" / "convert_stories260k.py"

# The greedy sample that upstream's stories260K.md publishes.
PUBLISHED = """\
Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, \
red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, "I want to play with \
your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she said, "I'm sorry, mom. I didn't know what to do." Her mom said, "Don't worry, \
Lily. We can help you."""


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(target_dir())


@functools.cache
def model(directory):
    return AutoModelForCausalLM.from_pretrained(directory)


@functools.cache
def script():
    spec = importlib.util.spec_from_file_location("convert_stories260k", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def pieces():
    return script().read_vocabulary(SOURCE / "tok512.bin", 512)


def greedy_encode(text):
    """The encoder of llama2.c: characters, or bytes where there is none, then the best-scored adjacent pair, again."""
    number = {piece: i for i, (piece, _) in enumerate(pieces())}
    ids = []
    for char in ("▁" + text if text else "").replace(" ", "▁"):
        ids += [number[char]] if char in number else [byte + 3 for byte in char.encode()]
    while True:
        joined = [number.get(pieces()[a][0] + pieces()[b][0]) for a, b in itertools.pairwise(ids)]
        scored = [(-pieces()[new][1], at) for at, new in enumerate(joined) if new is not None]
        if not scored:
            return ids
        at = min(scored)[1]
        ids[at : at + 2] = [joined[at]]


def convert(source, out):
    command = [sys.executable, SCRIPT, source, out]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_greedy_text_is_the_published_one():
    inputs = tokenizer()("Once upon a time", return_tensors="pt")
    out = model(target_dir()).generate(**inputs, do_sample=False, max_length=257)
    assert tokenizer().decode(out[0], skip_special_tokens=True) == PUBLISHED


def test_tokenizer_encodes_as_llama2c_on_stories():
    text = PUBLISHED + "\n\n  Crème brûlée — “5 €” 🙂\ttab\r\n中文 x  y "
    assert tokenizer()(text).input_ids == [1, *greedy_encode(text)]
    assert tokenizer().decode(tokenizer()(text).input_ids, skip_special_tokens=True) == text


WORDS = st.sampled_from(["Once", "upon", "the", "there", "Timmy", "aaaa", "lll", "ssss", "hehehe", "....", '""', "né"])


# "<" would let hypothesis write a special token; "▁" stands for the blank, as in every sentencepiece vocabulary.
@given(st.lists(WORDS | st.text(st.characters(exclude_characters="<▁\0", codec="utf-8"), max_size=12)).map(" ".join))
@settings(max_examples=300, deadline=None)
@example(" ")
@example("  leading and trailing  ")
@example("")
def test_tokenizer_encodes_as_llama2c(text):
    ids = tokenizer()(text).input_ids
    assert ids == [1, *greedy_encode(text)]
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


def test_no_two_overlapping_joins_make_one_piece():
    # Only then could rank order (one rank a split) and score order (one score a piece) take different merges.
    merges = {pair for pair in script()._merges(pieces()) if pair[0] != pair[1]}
    assert not [(left, right) for left, right in merges for a, b in merges if right == a and left + right == a + b]


@pytest.mark.parametrize("directory", [target_dir(), draft_dir()], ids=["target", "draft"])
def test_each_directory_loads_on_its_own(directory):
    loaded = AutoTokenizer.from_pretrained(directory)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.is_fast) == (1, 2, True)
    assert loaded("The end.").input_ids == tokenizer()("The end.").input_ids
    config = model(directory).config
    assert (config.max_position_embeddings, config.num_key_value_heads, config.hidden_size) == (512, 4, 64)
    assert model(directory).dtype == torch.float32
    assert model(directory).generation_config.eos_token_id == [1, 2]


def test_draft_is_accepted_as_often_as_documented():
    ids = torch.tensor([tokenizer()(PUBLISHED).input_ids])
    with torch.no_grad():
        p, q = (model(path)(ids).logits.softmax(-1) for path in (target_dir(), draft_dir()))
    assert 0.45 < torch.minimum(p, q).sum(-1).mean().item() < 0.7


def test_conversion_reproduces_the_shipped_files(tmp_path):
    assert convert(SOURCE, tmp_path).returncode == 0
    for shipped in (target_dir(), draft_dir()):
        made = tmp_path / shipped.name
        assert sorted(p.name for p in made.iterdir()) == sorted(p.name for p in shipped.iterdir())
        for path in shipped.iterdir():
            assert (made / path.name).read_bytes() == path.read_bytes(), path
    assert json.loads((draft_dir() / "config.json").read_text())["num_hidden_layers"] == 4


def test_conversion_refuses_a_short_checkpoint_and_leaves_nothing(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "tok512.bin").write_bytes((SOURCE / "tok512.bin").read_bytes())
    (source / "stories260K.bin").write_bytes((SOURCE / "stories260K.bin").read_bytes()[:-4])
    run = convert(source, out)
    assert run.returncode == 1
    assert "264127 floats" in run.stderr
    assert "Traceback" not in run.stderr
    assert not out.exists()
