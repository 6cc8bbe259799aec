"""The script that samples instructions from a model: what it keeps, and that it ends."""

import argparse
import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftproof import UserError

SPEC = importlib.util.spec_from_file_location(
    "sample_instructions", Path(__file__).parents[2] / "scripts" / "made_once" / "sample_instructions.py"
)
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def engine(write=None, template="<user>{}</user>"):
    def tokenizer(text, *, add_special_tokens):
        assert not add_special_tokens, "the template contains them"
        return {"input_ids": [ord(letter) for letter in text]}

    return SimpleNamespace(
        target=SimpleNamespace(name="toy"),
        tokenizer=tokenizer,
        prompts=SimpleNamespace(chat_text=lambda messages: template.format(messages[0]["content"])),
        generate=write,
    )


def options(**more):
    return argparse.Namespace(
        **{"target": "toy", "dtype": "auto", "batch": 2, "count": 3, "temperature": 1.0, "top_p": 0.9} | more,
        longest=9,
        seed=0,
    )


def collected(monkeypatch, texts, **more):
    """The texts that are kept, of pairs (text, finish reason) that come two at a time."""
    left, seeds = iter(texts), []

    def write(prompts, params):
        assert prompts == [[ord(letter) for letter in "<user>"]]
        seeds.append(params.seed)
        return [SimpleNamespace(text=text, finish_reason=end) for text, end in itertools.islice(left, params.n)]

    monkeypatch.setattr(script.Engine, "load", lambda *_, **__: engine(write))
    kept = script.collect(options(**more))
    assert len(set(seeds)) == len(seeds), "every batch has its own seed"
    return kept


def test_the_prompt_ends_where_a_user_begins():
    assert script.opening(engine()) == [ord(letter) for letter in "<user>"]
    for template in ("{0}{0}", "nothing"):
        with pytest.raises(UserError, match="the chat template of toy does not show"):
            script.opening(engine(template=template))


def test_complete_new_instructions_of_one_paragraph_are_kept(monkeypatch):
    texts = [
        (" name three birds ", "stop"),
        ("name three birds", "stop"),
        ("too short", "stop"),
        ("one\n\ntwo three", "stop"),
        ("cut off in the middle", "length"),
        ("what is a bird", "stop"),
        ("who saw the bird", "stop"),
        ("one more than requested", "stop"),
    ]
    assert collected(monkeypatch, texts) == ["name three birds", "what is a bird", "who saw the bird"]


def test_it_ends_with_a_model_that_writes_nothing_new(monkeypatch):
    same = [("name three birds", "stop")] * 100
    with pytest.raises(UserError, match=f"toy wrote {2 + 2 * script.PATIENCE} instructions, and 1 could be kept"):
        collected(monkeypatch, same)
    none = [("no", "stop")] * 100
    with pytest.raises(UserError, match=f"toy wrote {2 * script.PATIENCE} instructions, and 0 could be kept"):
        collected(monkeypatch, none)
