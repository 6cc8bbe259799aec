"""GGUF files by name: in a hub repository, its cache, and the folders of Ollama and LM Studio."""

import json
import os
import socket

import huggingface_hub
import pytest
import transformers
from huggingface_hub import constants
from typer.testing import CliRunner

from draftproof import UserError, models
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.cli import app
from draftproof.models import found
from draftproof.models.found import (
    base_name,
    found_files,
    hub_has_no_address,
    is_file_name,
    obtain_file,
    resolve_file,
)
from draftproof.models.gguf_file import is_gguf

FILES = [
    "x-Q4_K_M.gguf",
    "x-Q4_K_S.gguf",
    "x-q8_0-00001-of-00002.gguf",
    "x-q8_0-00002-of-00002.gguf",
    "mmproj-Q8_0.gguf",
]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-8b",
        "qwen3-8b-q4",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-8B-GGUF:Q4_K_M",
        "ollama:qwen3:8b-q4_K_M",
        "models/Qwen3-8B-UD-Q4_K_XL.gguf",
        "Qwen3-8B.IQ4_XS.gguf",
        "Qwen3-8B-f16-00001-of-00003.gguf",
        "Qwen/Qwen3-8B-AWQ/",
        "Qwen3-8B-GPTQ-Int4",
        "X/Qwen3-8B-bnb-4bit",
        "X/Qwen3-8B-quantized.w4a16",
        "X/Qwen3-8B-FP8-dynamic",
        "qwen3-8b-mxfp4",
        "X/qwen3-8b-gptq_q4_g128",
        "X/Qwen3-8B-NVFP4",
        "hub/models--Qwen--Qwen3-8B-AWQ/snapshots/0123abc",
    ],
)
def test_forms_of_a_model_have_one_name(name):
    assert base_name(name) == "qwen3-8b"


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen3-8B-Base", "qwen3-8b-base"),
        ("Qwen3-4B-Q8_0.gguf", "qwen3-4b"),
        ("X/Qwen3-8B-int-Q4_K_M.gguf", "qwen3-8b-int"),
        ("ollama:smollm2", "smollm2"),
        ("embedded:stories", "stories"),
        ("q4.gguf", "q4"),
    ],
)
def test_other_models_have_others(name, base):
    assert base_name(name) == base


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def put(path, content=b"GGUF and more"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def in_hub(home, *files, repository="models--bob--x-GGUF", snapshot="1"):
    return [put(home / "hub" / repository / "snapshots" / snapshot / file) for file in files]


def in_ollama(home, name="library/llama3.2/1b", digest="sha256:12", host="registry.ollama.ai", kind="model"):
    layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest}]
    put(home / ".ollama/models/manifests" / host / name, json.dumps({"layers": layers}).encode())
    return put(home / ".ollama/models/blobs" / digest.replace(":", "-"))


def test_names():
    for name in ("bob/x-GGUF:Q4_K_M", "bob/x:q8_0", "ollama:llama3.2", "ollama:bob/x:1b"):
        assert is_file_name(name)
    for name in ("bob/x", "embedded:target", "x.gguf", "./a/b.gguf", "C:/x", "gpt2"):
        assert not is_file_name(name)


def test_a_file_of_a_repository_in_the_cache(home):
    paths = in_hub(home, *FILES)
    assert resolve_file("bob/x-GGUF:Q4_K_M") == str(paths[0])
    assert resolve_file("bob/x-GGUF:q4_k_s") == str(paths[1])
    assert resolve_file("bob/x-GGUF:Q8_0") == str(paths[2]), "the first of two parts, and no projector"
    assert models.resolve("bob/x-GGUF:Q4_K_M") == str(paths[0])
    with pytest.raises(UserError, match=r"bob/x-GGUF:Q4 is not on this machine.*x-Q4_K_M\.gguf"):
        resolve_file("bob/x-GGUF:Q4")
    with pytest.raises(UserError, match=r"files of bob/y that are here: none"):
        resolve_file("bob/y:Q4_K_M")
    in_hub(home, "other-Q4_K_M.gguf")
    with pytest.raises(UserError, match=r"several files are 'Q4_K_M': other-Q4_K_M\.gguf, x-Q4_K_M\.gguf"):
        resolve_file("bob/x-GGUF:Q4_K_M")


def test_the_newest_snapshot_is_taken(home):
    old, new = (in_hub(home, "x-Q4_K_M.gguf", snapshot=name)[0] for name in ("b", "a"))
    for newest, path in ((new, old), (old, new)):  # whatever their names are
        os.utime(path.parent, (1, 1))
        os.utime(newest.parent, (2, 2))
        assert resolve_file("bob/x-GGUF:Q4_K_M") == str(newest)
        assert [each.path for each in found_files()] == [newest]


@pytest.fixture
def hub_with_an_address(monkeypatch):
    monkeypatch.setattr(found.socket, "getaddrinfo", lambda *_: [])


@pytest.fixture
def hub_without_an_address(monkeypatch):
    def fail(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(found.socket, "getaddrinfo", fail)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_a_file_of_the_hub_is_downloaded_with_its_parts(home, hub_with_an_address, monkeypatch):
    fetched = []

    def fetch(repository, file):
        fetched.append((repository, file))
        return f"/cache/{file}"

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda _, __: [*FILES, "README.md"])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert obtain_file("bob/x:Q8_0", offline=False) == f"/cache/{FILES[2]}"
    assert fetched == [("bob/x", FILES[2]), ("bob/x", FILES[3])]
    with pytest.raises(UserError, match=r"files of bob/x: expected one of .*, got 'Q2_K'"):
        obtain_file("bob/x:Q2_K", offline=False)
    with pytest.raises(UserError, match="is not on this machine"):
        obtain_file("bob/x:Q8_0", offline=True)


def test_the_hub_is_not_asked_where_its_name_has_no_address(home, hub_without_an_address, monkeypatch):
    """Its library would repeat each request for a minute."""
    for asked in ((huggingface_hub.HfApi, "list_repo_files"), (transformers.AutoTokenizer, "from_pretrained")):
        monkeypatch.setattr(*asked, lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UserError, match=r"bob/x:Q8_0 is not on this machine: .* or the hub cannot be reached"):
        obtain_file("bob/x:Q8_0", offline=False)
    with pytest.raises(
        UserError, match=r"cannot load 'bob/x': no such model is on this machine, and the hub cannot be"
    ):
        load_tokenizer("bob/x")


def test_a_kept_repository_is_read_without_the_hub(home, hub_without_an_address, monkeypatch):
    (home / "hub" / "models--bob--x" / "snapshots" / "1").mkdir(parents=True)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda source, **_: source)
    assert load_tokenizer("bob/x") == "bob/x"


def test_a_repository_of_gguf_files_is_no_model_alone_and_that_is_said(home, hub_with_an_address, monkeypatch):
    def refuse(*_, **__):
        raise OSError("it has no config.json")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(UserError, match=r"it has no config\.json \(of \.gguf files .* its kind: bob/x-GGUF:Q4_K_M\)$"):
        load_tokenizer("bob/x-GGUF")
    with pytest.raises(UserError, match=r"it has no config\.json$"):
        load_tokenizer("bob/x")


def test_a_proxy_resolves_names(hub_without_an_address, monkeypatch):
    assert hub_has_no_address()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    assert not hub_has_no_address()


def test_what_the_hub_refuses_is_said(home, hub_with_an_address, monkeypatch):
    def refuse(*_):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    with pytest.raises(UserError, match=r"cannot list the files of bob/x on the hub: .*no route"):
        obtain_file("bob/x:Q8_0", offline=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda _, __: FILES)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(UserError, match=r"cannot download x-Q4_K_M\.gguf of bob/x from the hub: .*no route"):
        obtain_file("bob/x:Q4_K_M", offline=False)


def test_models_of_ollama(home):
    blob = in_ollama(home)
    other = in_ollama(home, "bob/y/latest", "sha256:34")
    elsewhere = in_ollama(home, "a/z/7b", "sha256:56", host="hf.co")
    in_ollama(home, "library/broken/latest", "sha256:78", kind="adapter")
    put(home / ".ollama/models/manifests/registry.ollama.ai/library/odd/latest", b"[")
    assert resolve_file("ollama:llama3.2:1b") == str(blob)
    assert resolve_file("ollama:bob/y") == str(other)
    assert resolve_file("ollama:hf.co/a/z:7b") == str(elsewhere)
    assert is_gguf(blob)
    assert not is_gguf(put(home / "plain", b"else"))
    with pytest.raises(UserError, match=r"models of Ollama .*'llama3\.2:latest', found .*llama3\.2:1b"):
        models.resolve("ollama:llama3.2")
    for name in ("broken", "odd"):
        with pytest.raises(UserError, match="names no model file that is there"):
            resolve_file(f"ollama:{name}")


def test_a_name_of_ollama_without_its_prefix_is_recognised(home):
    in_ollama(home)
    in_ollama(home, "library/mistral/latest", "sha256:34")
    with pytest.raises(
        UserError, match=r"no such file or directory: 'llama3\.2:1b'.*did you mean ollama:llama3\.2:1b\?"
    ):
        models.resolve("llama3.2:1b")
    assert "did you mean ollama:mistral?" in models.nowhere("mistral")
    with pytest.raises(UserError, match=r"no such file or directory: 'llama3\.2:7b'") as caught:
        models.resolve("llama3.2:7b")
    assert "did you mean" not in str(caught.value)


def test_what_is_on_this_disk(home):
    blob = in_ollama(home)
    (first, *_) = in_hub(home, *FILES[2:4])
    (studio, *_) = [put(home / f".lmstudio/models/bob/x/y-0000{number}-of-00002.gguf") for number in (1, 2)]
    put(home / ".lmstudio/models/bob/x/mmproj-y.gguf")
    found = {(each.keeper, each.name): each.path for each in found_files()}
    assert found == {
        ("Ollama", "ollama:llama3.2:1b"): blob,
        ("LM Studio", str(studio)): studio,
        ("hub cache", str(first)): first,
    }
    made = CliRunner().invoke(app, ["models", "list", "--found", "--json"])
    sizes = {row["path"]: row["bytes"] for row in json.loads(made.stdout)}
    assert sizes == {str(blob): 13, str(studio): 26, str(first): 26}, "those of all parts"
    assert "ollama:llama3.2:1b  (Ollama, 0.00 GB)" in CliRunner().invoke(app, ["models", "list", "--found"]).stdout


def test_links_to_files_that_are_gone_are_no_models(home):
    (kept,) = in_hub(home, "x-Q4_K_M.gguf")
    for link in (kept.with_name("x-Q8_0.gguf"), home / ".lmstudio/models/bob/x/y-Q4_0.gguf"):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(home / "gone")
    assert [each.path for each in found_files()] == [kept]
    with pytest.raises(UserError, match=r"x-GGUF:Q8_0 is not on this machine.*that are here: x-Q4_K_M\.gguf\)"):
        resolve_file("bob/x-GGUF:Q8_0")


def test_nothing_is_on_this_disk(home):
    assert found_files() == []
    made = CliRunner().invoke(app, ["models", "list", "--found"])
    assert made.exit_code == 0
    assert "no .gguf files" in made.output
