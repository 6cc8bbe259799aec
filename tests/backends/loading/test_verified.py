"""A model that was checked once loads without transformers, with the very same numbers; else it is checked again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

import draftproof
from draftproof import Engine, SamplingParams, UserError, native
from draftproof.backends.base import Feed
from draftproof.backends.lean.backend import LeanBackend, LeanForward
from draftproof.backends.loading import load as door
from draftproof.backends.loading import tokenization
from draftproof.backends.loading import verified as checked
from draftproof.backends.loading.fast_tokenizer import Description, FastTokenizer, describe
from draftproof.backends.loading.options import LoadOptions
from draftproof.embedded import stories_target_dir, target_dir
from draftproof.tree import TokenTree
from support.helpers import CONFIGS
from support.lean_models import VARIANTS, lively_model

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """An empty home of its own, where checks are kept; the native library is taken from the usual one."""
    native.levels()
    monkeypatch.setenv(checked.VARIABLE, "1")
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "checked"


@pytest.fixture
def copied(tmp_path):
    """A copy of the embedded target that a test may change."""
    return str(shutil.copytree(target_dir(), tmp_path / "model"))


def load(name, **changes):
    return door.load(name, LoadOptions(device="cpu", **changes))


def first_and_second(name, **changes):
    first = load(name, **changes).backend
    assert type(first) is LeanBackend
    return first, load(name, **changes).backend


def rows(backend):
    """Logits of a prompt past every window, read in pieces, of a chain and of a tree after it."""
    session = backend.open()
    prompts = ([1, 80, 90, 11], [i * i % 97 for i in range(60)])
    found = [backend.forward([Feed(session, tokens)])[0].logits for tokens in prompts]
    tree = TokenTree(torch.tensor([5, 6, 7, 8]), (-1, 0, -1, 2))
    found.append(backend.forward([Feed(session, [3], tree)])[0].logits)
    session.close()
    return torch.cat(found)


def records(folder):
    return sorted(path for path in folder.glob("*.json") if ".tokenizer" not in path.name)


@pytest.mark.grid(8)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "auto") for name in VARIANTS),
        *(pytest.param(name, "bfloat16", marks=[pytest.mark.slow] * (name not in CONFIGS)) for name in VARIANTS),
    ],
)
def test_the_second_start_has_the_same_bits_without_transformers(name, dtype, tmp_path):
    model = tmp_path / "model"
    lively_model(VARIANTS[name]()).save_pretrained(model, max_shard_size="40KB" if name == "qwen2" else "1GB")
    for file in TOKENIZER:
        shutil.copy(target_dir() / file, model)
    first, second = first_and_second(str(model), dtype=dtype)
    assert type(second) is LeanForward
    assert torch.equal(rows(second), rows(first))
    assert second.facts == first.facts
    assert (second.capabilities, second.max_positions) == (first.capabilities, first.max_positions)
    assert torch.equal(rows(second.first_layers(1)), rows(first.first_layers(1)))


@pytest.mark.slow
def test_a_process_needs_no_transformers():
    code = """
import sys
from draftproof import Engine, SamplingParams
engine = Engine.load("embedded:target", "embedded:draft", stopper="fixed:3")
params = [SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, seed=5)]
made = [list(out.token_ids) for out in engine.generate(["Once upon a time"] * 2, params)]
print([made, [out for out in ("transformers",) if out in sys.modules]])
"""
    environment = os.environ | {native.VARIABLE: "0"}
    made = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    (first, had), (second, has) = (json.loads(each.replace("'", '"')) for each in made)
    assert first == second
    assert (had, has) == (["transformers"], [])


def test_engines_answer_alike():
    names = ("embedded:stories", "embedded:stories-draft")
    engines = [Engine.load(*names, stopper="fixed:3") for _ in range(2)]
    assert [type(engine.target) for engine in engines] == [LeanBackend, LeanForward]
    params = SamplingParams(max_tokens=32, seed=3, stop=("little",), bad_words=("girl",))
    first, second = (engine.generate(["Once upon a time", "The dog"], params) for engine in engines)
    assert [out.to_dict()["text"] for out in first] == [out.to_dict()["text"] for out in second]
    assert engines[0].eos_token_ids == engines[1].eos_token_ids


# --- what makes a model be checked again ------------------------------------------------------------------------------


def rewrite(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def another_weight(model):
    """Change the weights, but neither their size nor their time."""
    path = model / "model.safetensors"
    state, content = path.stat(), bytearray(path.read_bytes())
    numbers = torch.frombuffer(content, dtype=torch.float32, offset=len(content) - 200_000)
    numbers.copy_(numbers.flip(0))
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


CHANGES = {
    "config": lambda model: rewrite(model / "config.json", lambda row: row.update(rms_norm_eps=0.1)),
    "generation config": lambda model: rewrite(model / "generation_config.json", lambda row: row.update(top_k=3)),
    "tokenizer": lambda model: rewrite(model / "tokenizer_config.json", lambda row: row.update({"pad_token": "<s>"})),
    "time of the weights": lambda model: os.utime(model / "model.safetensors", (1, 1)),
    "a file more": lambda model: (model / "chat_template.jinja").write_text("{{ messages }}"),
    "weights alone": another_weight,
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_checked_again(change, copied, tmp_path):
    first_and_second(copied)
    CHANGES[change](tmp_path / "model")
    again, after = first_and_second(copied)
    assert type(after) is LeanForward
    assert torch.equal(rows(after), rows(again))


def versions(monkeypatch):
    monkeypatch.setattr(checked, "version", lambda name: f"{name} 0")


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    "change",
    [
        versions,
        lambda monkeypatch: monkeypatch.setattr(checked, "_code", lambda: "other code"),
        lambda monkeypatch: monkeypatch.setenv("DRAFTPROOF_NATIVE", "0"),
        lambda monkeypatch: monkeypatch.setenv(checked.VARIABLE, "0"),
    ],
    ids=["libraries", "code", "native level", "switched off"],
)
def test_a_changed_machine_checks_again(change, copied, monkeypatch):
    first_and_second(copied)
    change(monkeypatch)
    assert type(load(copied).backend) is LeanBackend


def damage(change):
    return lambda path: rewrite(path, change)


DAMAGES = {
    "no JSON": lambda path: path.write_text("{"),
    "no object": lambda path: path.write_text("[]"),
    "a field less": damage(lambda row: row.pop("facts")),
    "another norm": damage(lambda row: row["architecture"].update(eps=0.5)),
    "other angles": damage(lambda row: row["architecture"].update(angle_scale=1.5)),
    "more layers": damage(lambda row: row["architecture"].update(layers=9)),
    "other logits": damage(lambda row: row["logits"][3].__setitem__(0, 1e6)),
    "a number of 400 digits": damage(lambda row: row["logits"][3].__setitem__(0, 10**400)),
    "nested too deeply": lambda path: path.write_text("[" * 200_000),
    "other types": damage(lambda row: row.update(tokens="a", dtype=7)),
    "not a number": damage(lambda row: row["logits"][3].__setitem__(0, float("nan"))),
    "written by others": lambda path: path.chmod(0o666),
    "in a folder for all": lambda path: path.parent.chmod(0o777),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record_is_not_believed(name, copied, kept):
    first, _ = first_and_second(copied)
    (record,) = records(kept)
    DAMAGES[name](record)
    again = load(copied).backend
    assert type(again) is LeanBackend
    assert torch.equal(rows(again), rows(first))
    assert type(load(copied).backend) is LeanForward, "it was kept anew"


def test_all_code_that_reads_models_is_part_of_the_key(tmp_path):
    """Also that in folders of folders, whatever is moved."""
    package = tmp_path / "draftproof"
    made = ["backends/a.py", "backends/heads/published/b.py", "backends/deep/er/c.py", "triton/d.py", "native/c/e.c"]
    made += ["native/c/inner/f.h"]
    for name in made:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / "backends" / "notes.txt").touch()
    found = {path for path in checked._sources(package) if path.is_relative_to(package)}
    assert found == {package / name for name in made}
    ours = {path.name for path in checked._sources(Path(draftproof.__file__).parent)}
    assert {"eagle3.py", "fast_tokenizer.py", "native.c", "verified.py"} < ours


def test_the_oldest_checks_go(copied, kept, monkeypatch):
    monkeypatch.setattr(checked, "_MOST", 2)
    first_and_second(copied)
    for path in kept.iterdir():
        os.utime(path, (1, 1))
    first_and_second("embedded:stories")
    assert len(records(kept)) == 1
    assert type(load("embedded:stories").backend) is LeanForward
    assert type(load(copied).backend) is LeanBackend


@pytest.mark.parametrize("options", [{"check": False}, {"backend": "hf"}, {"trust_remote_code": True}], ids=str)
def test_nothing_is_kept_of_what_was_not_checked(options, copied, kept):
    assert load(copied, **options).backend is not None
    assert not kept.exists()
    first_and_second(copied)
    assert type(load(copied, **options).backend) is not LeanForward


def test_nothing_is_kept_where_nothing_can_be(copied, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "file" / "home"))
    assert all(type(each) is LeanBackend for each in first_and_second(copied))


def test_errors_are_those_of_a_first_start(copied, tmp_path):
    first_and_second(copied)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot load a model"):
        _ = load(copied).backend
    with pytest.raises(UserError, match="no such file or directory"):
        load(str(tmp_path / "nowhere"))


def test_too_different_a_tokenizer_is_refused_before_models_are_read(monkeypatch, copied):
    first_and_second(copied)
    first_and_second("embedded:stories")
    monkeypatch.setattr(door, "load_backend", None)
    monkeypatch.setattr(checked.StoredCheck, "backend", None)
    monkeypatch.setattr(tokenization, "LEAST_SHARED", 1.0)
    with pytest.raises(UserError, match="cannot draft for"):
        Engine.load("embedded:stories", copied)


# --- tokenizers -------------------------------------------------------------------------------------------------------

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou help."
    "<|im_end|>\n{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, True),
    "special tokens": ("{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", True),
    "refuses system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}",
        True,
    ),
    "loop controls": ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", True),
    "tools": ("{% if tools is not none %}tools{% endif %}{{ messages[0].content }}", True),
    "the date": ("{{ strftime_now('%Y') }}{{ messages[0].content }}", False),
    "JSON": ("{{ messages | tojson }}", False),
}


def fast(tokenizer):
    content, row = describe(tokenizer)
    return FastTokenizer(content, Description(**row), lambda: tokenizer)


@pytest.fixture(scope="module", params=[target_dir, stories_target_dir], ids=["target", "stories"])
def pair(request):
    tokenizer = AutoTokenizer.from_pretrained(request.param())
    return fast(tokenizer), tokenizer


@given(text=st.text(max_size=80), special=st.booleans())
def test_texts_are_encoded_and_decoded_as_transformers_does(pair, text, special):
    ours, theirs = pair
    ids = ours(text, add_special_tokens=special)["input_ids"]
    assert ids == theirs(text, add_special_tokens=special)["input_ids"]
    options = {"skip_special_tokens": special, "clean_up_tokenization_spaces": False}
    assert ours.decode(ids, **options) == theirs.decode(ids, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_make_the_same_text(name, pair):
    _, tokenizer = pair
    template, renders = TEMPLATES[name]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = template
    assert describe(tokenizer)[1]["renders"] is renders
    ours, options = fast(tokenizer), {"add_generation_prompt": True, "tokenize": False}
    chats = [
        [{"role": "user", "content": "<b> 'Hi' & \n"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "Hi", "name": "Ann"}],
    ]
    for chat in chats:
        try:
            expected = tokenizer.apply_chat_template(chat, **options)
        except TemplateError as error:
            with pytest.raises(type(error), match=str(error)):
                ours.apply_chat_template(chat, **options)
        else:
            assert ours.apply_chat_template(chat, **options) == expected


def test_what_it_does_not_do_transformers_does(pair):
    ours, theirs = pair
    assert ours.batch_decode([[5, 6]]) == theirs.batch_decode([[5, 6]])
    assert ours(["a", "b c"]) == theirs(["a", "b c"])
    assert ours.decode(5) == theirs.decode(5)
    assert ours.convert_ids_to_tokens([5, 6]) == theirs.convert_ids_to_tokens([5, 6])
    assert (ours.vocab_size, len(ours), ours.name_or_path) == (theirs.vocab_size, len(theirs), theirs.name_or_path)
    with pytest.raises(AttributeError):
        _ = ours.nothing_of_the_kind


def test_a_tokenizer_that_does_otherwise_is_not_described(pair):
    _, tokenizer = pair
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)

    class Shouting(type(tokenizer)):
        def __call__(self, text, **options):
            return super().__call__(text.upper(), **options)

    tokenizer.__class__ = Shouting
    assert describe(tokenizer) is None
