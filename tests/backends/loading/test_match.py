"""What on a disk can draft for a target: by tokenizer and bytes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from draftproof import Engine, UserError, models
from draftproof.backends.loading import match
from draftproof.backends.loading.load import load
from draftproof.backends.loading.match import VERIFIED, Match, WeightReads, matches, own_layer, reads
from draftproof.cli import app
from draftproof.embedded import draft_dir, stories_draft_dir, stories_target_dir, target_dir
from draftproof.engine import engine
from draftproof.models.found import found_checkpoints
from draftproof.models.gguf_file import GGUFFile
from draftproof.models.layers import truncated_copy
from support.gguf_files import write_llama
from support.gguf_modules import module_model, write_modules
from support.qwen_mtp import tensors_of, written_with
from support.vocabularies import renumbered

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, source in (("small", draft_dir()), ("same", target_dir()), ("other", stories_target_dir())):
        shutil.copytree(source, tmp_path / "here" / name)
    renumbered(draft_dir(), tmp_path / "here" / "renumbered", missing=0.3)
    (tmp_path / "here" / "broken").mkdir()
    (tmp_path / "here" / "broken" / "config.json").write_text("{}")
    return tmp_path / "here"


def test_what_fits_comes_first_and_what_does_not_says_why(folder):
    found = {each.name.rsplit("/", 1)[-1]: each for each in matches(load("embedded:target"), [folder])}
    assert next(iter(found)) == "small"
    assert found["small"].why_not == ""
    assert 0 < found["small"].share < 1
    assert "not smaller than the target" in found["same"].why_not
    assert found["small"].shared is None
    assert found["renumbered"].why_not == ""
    assert 0.3 < found["renumbered"].shared < 1
    assert "not smaller than the target" in found["other"].why_not
    assert found["other"].shared is None, "no tokenizer is read where the size already says no"
    assert found["broken"].why_not


def test_a_candidate_that_cannot_be_had_is_listed_with_its_error(folder):
    (folder / "gone.gguf").symlink_to(folder / "nowhere.gguf")
    found = {each.name.rsplit("/", 1)[-1]: each for each in matches(load("embedded:target"), [folder])}
    assert "no such file or directory" in found["gone.gguf"].why_not
    assert found["small"].why_not == ""


def test_the_cost_of_five_rows_is_the_measured_one():
    measured = json.loads((ROOT / "docs" / "results" / "gguf.json").read_text(encoding="utf-8"))
    times = measured["random 1.5b, Q4_K_M's types"]["rows"]
    assert times["5"] / times["1"] == pytest.approx(VERIFIED, abs=0.005)


def in_hub(folder, source, repository="bob/small", commit="1" * 40):
    """A model in a pretended cache of the hub."""
    held = folder.parent / "hub" / f"models--{repository.replace('/', '--')}"
    (held / "refs").mkdir(parents=True, exist_ok=True)
    (held / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(source, held / "snapshots" / commit))


def test_checkpoints_in_the_cache_of_the_hub_are_listed(folder):
    place = in_hub(folder, draft_dir())
    in_hub(folder, draft_dir(), commit="2" * 40)  # another revision, which the id does not stand for
    (place.parents[1] / "refs" / "main").write_text("1" * 40)
    half = in_hub(folder, draft_dir(), "bob/half")
    (half / "model.safetensors").unlink()
    encoder = in_hub(folder, draft_dir(), "bob/encoder")
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    in_hub(folder, draft_dir(), "bob/lost", "3" * 40)
    (folder.parent / "hub" / "models--bob--lost" / "refs" / "main").write_text("4" * 40)
    assert [(each.name, each.path) for each in found_checkpoints()] == [("bob/small", place)]
    found = {each.name: each for each in matches(load("embedded:target"))}
    assert found["bob/small"].why_not == ""
    assert found["bob/small"].nbytes == round(reads(draft_dir()).of(1))
    shown = CliRunner().invoke(app, ["models", "match", "embedded:target"]).stdout
    assert f"bob/small  {found['bob/small'].nbytes / 1e9:.2f} GB per token, 0." in shown


def test_the_target_itself_in_the_cache_of_the_hub_is_left_out(folder):
    in_hub(folder, target_dir(), "bob/target")
    assert [each.name for each in matches(load(str(in_hub(folder, draft_dir()))))] == ["bob/target"]
    target = next(each for each in found_checkpoints() if each.name == "bob/target")
    assert [each.name for each in matches(load(str(target.path)))] == ["bob/small"]


def checkpoint_of(folder, sizes, **config):
    """A directory with the tensors of these sizes, in bytes."""
    folder.mkdir()
    save_file(
        {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_a_token_reads_of_a_checkpoint(tmp_path):
    sizes = {"model.embed_tokens.weight": 1000, "model.layers.0.mlp.up_proj.weight": 300}
    assert reads(checkpoint_of(tmp_path / "tied", sizes)).of(1) == 1300
    untied = {**sizes, "lm_head.weight": 1000}
    assert reads(checkpoint_of(tmp_path / "untied", untied)).of(1) == 1300
    experts = {**untied, "model.layers.0.mlp.experts.gate_up_proj": 1600, "model.layers.0.mlp.gate.weight": 20}
    fields = {"num_experts": 8, "num_experts_per_tok": 2}
    for name, config in (("experts", fields), ("nested", {"text_config": fields})):
        made = reads(checkpoint_of(tmp_path / name, experts, **config))
        assert (made.of(1), made.of(2)) == (1320 + 400, 1320 + 1600 * (1 - (6 / 8) ** 2))
    assert reads(checkpoint_of(tmp_path / "unknown", experts)).of(1) == 2920, "all of them, where nothing says how many"


def test_rows_of_a_mixture_read_more():
    """Qwen3-30B-A3B: a fifth of what a token reads is not in experts, and 8 of 128 are chosen; five rows read 3.7 times
    as much. Nothing gains there that would gain 1.7 times with a dense target."""
    whole = WeightReads(200, 800 * 128 // 8, 8 / 128)
    growth = tuple(whole.of(rows) / whole.of(1) for rows in range(2, 10))
    distinct = 128 * (1 - (1 - 8 / 128) ** 5)
    assert growth[3] == pytest.approx((200 + 800 * distinct / 8) / 1000)
    dense, mixture = Match("x", 1, 0.1, ""), Match("x", 1, 0.1, "", growth=growth)
    assert dense.gain(0.7)[0] > 1.5
    assert mixture.gain(0.7)[0] < 1.1
    assert mixture.gain(0.7)[1] < dense.gain(0.7)[1]


def test_a_mixture_in_a_gguf_file_reads_the_experts_of_a_token(tmp_path):
    write_modules(tmp_path / "x.gguf", module_model("qwen35moe"), "qwen35moe", (8,))
    file, found = GGUFFile(tmp_path / "x.gguf"), reads(tmp_path / "x.gguf")
    assert round(found.of(1)) == sum(entry.nbytes for entry in file.read_for_a_token)
    assert 0 < found.chosen < 1
    assert found.of(1) < found.of(2) < 2 * found.of(1)


@pytest.mark.parametrize("name", ["qwen35", "qwen35, tied"])
def test_a_gguf_file_reads_its_output_layer_and_no_other_table(name, tmp_path):
    write_modules(tmp_path / "x.gguf", module_model(name), name, (8,))
    file = GGUFFile(tmp_path / "x.gguf")
    assert ("output.weight" in file.tensors) == ("tied" not in name)
    assert reads(tmp_path / "x.gguf").of(1) == sum(entry.nbytes for entry in file.read_for_a_token)


def test_a_prediction_layer_of_the_target_is_listed_first(folder, tmp_path):
    model = module_model("qwen35")
    own = tensors_of(model.config)
    file, checkpoint = tmp_path / "predicting.gguf", tmp_path / "predicting"
    write_modules(file, model, "qwen35", (8,), own=own)
    checkpoint.mkdir()
    written_with(checkpoint, model, own)
    for where in (file, checkpoint):
        layer, whole = own_layer(str(where)), reads(where)
        output = model.lm_head.weight.numel()
        sizes = output + sum(each.numel() for each in own.values()), whole.of(1)
        assert layer.nbytes / sizes[0] == pytest.approx(34 / 32 if where == file else 4, rel=0.02)
        assert layer.share == pytest.approx(layer.nbytes / sizes[1])
        others = sum(each.numel() for each in model.parameters()) - model.model.embed_tokens.weight.numel()
        assert whole.of(1) / others == pytest.approx(34 / 32 if where == file else 4, rel=0.02), "without that layer"
    shown = CliRunner().invoke(app, ["models", "match", str(file), "--in", str(folder)]).stdout
    assert shown.startswith("its own prediction layer (--drafter mtp; auto uses it)  0.00 GB per token, 0.")
    (row, *_) = json.loads(CliRunner().invoke(app, ["models", "match", str(file), "--json"]).stdout)
    assert (row["name"], row["why_not"]) == ("mtp", "")
    assert row["gain"] > 0
    write_modules(file, model, "qwen35", (8,))
    assert own_layer(str(file)) is None
    assert own_layer("embedded:target") is None


def test_the_gain_is_that_of_the_bytes():
    one = Match("x", 1, 0.1, "")
    gains = {g: (1 - 0.8 ** (g + 1)) / 0.2 / (g * 0.1 + VERIFIED) for g in range(1, 9)}
    best = max(gains, key=gains.get)
    assert one.gain(0.8) == (pytest.approx(gains[best]), best)
    assert one.gain(0.5)[1] < best


def loaded(monkeypatch, *places, draft=None):
    """What an engine loads that finds its draft model among these."""
    names = []
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")  # where HOME is empty, the library would be built
    monkeypatch.setattr(match, "found_files", lambda: [SimpleNamespace(name=str(place)) for place in places])
    monkeypatch.setattr(match, "found_checkpoints", list)
    monkeypatch.setattr(engine, "load", lambda name, *rest, **more: names.append(name) or load(name, *rest, **more))
    Engine.load("embedded:stories", draft, find_draft=True, drafter="none", check=False)
    return names


def test_an_engine_takes_the_model_on_this_disk_that_gains_most(folder, monkeypatch, caplog):
    shallow = truncated_copy(stories_target_dir(), [0], folder / "shallow")
    here = [folder / "other", folder / "broken", stories_draft_dir(), shallow]
    smallest = min(here[2:], key=lambda place: (place / "model.safetensors").stat().st_size)
    assert loaded(monkeypatch, *here) == ["embedded:stories", str(smallest)]
    assert f"the draft model of embedded:stories is {smallest}, which reads 0." in caplog.text
    named = str(stories_draft_dir())
    assert loaded(monkeypatch, *here, draft=named) == ["embedded:stories", named]  # a name goes before what is found


def test_without_a_model_that_gains_an_engine_has_no_draft_model(folder, monkeypatch, caplog):
    here = [folder / name for name in ("other", "renumbered", "broken")]
    assert loaded(monkeypatch, *here) == ["embedded:stories"]
    assert "no model on this disk gains as a draft model of embedded:stories" in caplog.text


def test_a_file_with_several_names_is_listed_once(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        write_llama(folder / name / "x.gguf")
    (folder / "b" / "x.gguf").unlink()
    (folder / "b" / "x.gguf").hardlink_to(folder / "a" / "x.gguf")
    (folder / "b" / "link.gguf").symlink_to(folder / "a" / "x.gguf")
    target = load("embedded:target")
    assert [each.name for each in matches(target, [folder]) if each.name.endswith(".gguf")] == [
        str(folder / "a" / "x.gguf")
    ]
    assert not [each for each in matches(load(str(folder / "b" / "link.gguf")), [folder]) if "gguf" in each.name]


def test_a_directory_to_search_that_is_not_there_is_an_error(folder):
    wrong = CliRunner().invoke(app, ["models", "match", "embedded:target", "--in", str(folder / "nowhere")])
    assert wrong.exit_code == 1
    assert "expected directories to search for models, got " in wrong.output


def test_a_repository_of_gguf_files_as_the_target_says_how_a_file_is_named(folder):
    kept = folder.parent / "hub" / "models--bob--x-GGUF" / "snapshots" / "1"
    kept.mkdir(parents=True)
    write_llama(kept / "x-Q4_K_M.gguf")
    wrong = CliRunner().invoke(app, ["models", "match", "bob/x-GGUF"])
    assert wrong.exit_code == 1
    assert "cannot read the weights of bob/x-GGUF" in wrong.output
    assert "bob/x-GGUF:Q4_K_M" in wrong.output
    assert "Errno" not in wrong.output


def test_the_command(folder):
    shown = CliRunner().invoke(app, ["models", "match", "embedded:target", "--in", str(folder)])
    assert shown.exit_code == 0, shown.output
    first, *_ = shown.stdout.splitlines()
    assert "small" in first
    assert "times as fast" in first
    assert "other vocabulary" not in first
    assert "other vocabulary: " in next(line for line in shown.stdout.splitlines() if "renumbered" in line)
    made = CliRunner().invoke(app, ["models", "match", "embedded:target", "--in", str(folder), "--json"])
    rows = json.loads(made.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert rows[0]["gain"] > 0
    assert {row["share"] for row in rows if "broken" in row["name"]} == {None}
    alone = CliRunner().invoke(app, ["models", "match", "embedded:target"])
    assert "no models found" in alone.output
    wrong = CliRunner().invoke(app, ["models", "match", "embedded:target", "--accepted", "1.5"])
    assert wrong.exit_code == 1
    assert "between 0 and 1" in wrong.output


def test_a_target_that_is_not_there(folder):
    with pytest.raises(UserError, match="no such file"):
        matches(load("./nowhere"), [folder])
    assert models.resolve("embedded:target")
