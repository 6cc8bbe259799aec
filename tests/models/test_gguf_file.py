"""GGUF files: metadata and tensors as gguf-py writes them, models in several files, and files that are none."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

from draftproof.errors import UserError
from draftproof.models.gguf_file import GGUFFile


def write(path, tensors=(), **options):
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 12.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "größer")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "größer"])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    writer.add_array("nested", [[1, 2], [3]])
    for name, content in tensors:
        writer.add_tensor(name, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path):
    return write(
        tmp_path / "x.gguf", [("b", np.arange(6, dtype=np.float32).reshape(2, 3)), ("a", np.ones(1, np.float16))]
    )


def test_metadata_and_tensors(path):
    file = GGUFFile(path)
    assert file.of_architecture("block_count") == 3
    assert file.of_architecture("context_length", 7) == 7
    assert file.get("llama.rope.freq_base") == 12.5
    assert file.get("tokenizer.ggml.add_bos_token") is True
    assert file.get("general.name") == "größer"
    assert file.get("tokenizer.ggml.tokens") == ["a", "", "größer"]
    assert list(file.get("tokenizer.ggml.token_type")) == [1, 2, 3]
    assert [list(each) for each in file.get("nested")] == [[1, 2], [3]]
    entry = file.tensors["b"]
    assert (entry.shape, entry.type) == ((2, 3), 0)
    assert np.array_equal(np.frombuffer(entry.map, np.float32, 6, entry.offset), np.arange(6))
    assert (file.tensors["a"].shape, file.tensors["a"].type) == ((1,), 1)


def test_a_model_in_several_files(tmp_path):
    tensors = [(f"t{number}", np.full((4, 4), number, np.float32)) for number in range(3)]
    write(tmp_path / "x.gguf", tensors, split_max_tensors=1)
    first = tmp_path / "x-00001-of-00003.gguf"
    file = GGUFFile(first)
    assert file.of_architecture("block_count") == 3
    for number in range(3):
        entry = file.tensors[f"t{number}"]
        assert np.frombuffer(entry.map, np.float32, 16, entry.offset).tolist() == [number] * 16
    with pytest.raises(UserError, match="part 2 of a model in 3 files: name the first one"):
        GGUFFile(tmp_path / "x-00002-of-00003.gguf")
    (tmp_path / "x-00003-of-00003.gguf").unlink()
    with pytest.raises(UserError, match=r"x-00003-of-00003\.gguf is missing"):
        GGUFFile(first)


def test_a_part_of_a_model_under_another_name_is_refused(tmp_path):
    tensors = [(f"t{number}", np.full((4, 4), number, np.float32)) for number in range(3)]
    write(tmp_path / "x.gguf", tensors, split_max_tensors=1)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes((tmp_path / "x-00001-of-00003.gguf").read_bytes())
    with pytest.raises(UserError, match=r"alone\.gguf is a part of a model in 3 files: .* MODEL-00001-of-00003\.gguf"):
        GGUFFile(alone)


def test_parts_of_different_models_are_refused(tmp_path):
    for name, count in (("x", 3), ("y", 6)):
        tensors = [(f"{name}{number}", np.full((4, 4), number, np.float32)) for number in range(count)]
        write(tmp_path / f"{name}.gguf", tensors, split_max_tensors=count // 3)
    (tmp_path / "y-00002-of-00003.gguf").replace(tmp_path / "x-00002-of-00003.gguf")
    with pytest.raises(UserError, match=r"have 4 tensors: expected 3 \(take all files from the same conversion"):
        GGUFFile(tmp_path / "x-00001-of-00003.gguf")


def test_a_file_that_is_cut_short_anywhere_is_refused(path, tmp_path):
    content, tensors = path.read_bytes(), GGUFFile(path).tensors.values()
    end = max(entry.offset + entry.nbytes for entry in tensors)
    for size in (0, 3, 23, *range(24, end, 7), end - 1):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"cannot read .*cut\.gguf .*is it a whole GGUF file") as caught:
            GGUFFile(cut)
        assert "mmap" not in str(caught.value)
        assert size >= 24 or ("it is empty" if not size else "it begins with" if size < 4 else f"{size} bytes") in str(
            caught.value
        )


def test_a_file_of_another_kind_is_refused(tmp_path, path):
    other = tmp_path / "other.gguf"
    content = path.read_bytes()
    for start in (b"GGUX", b"GGUF\x01\0\0\0", b"GGUF\0\0\0\x03"):
        other.write_bytes(start + content[len(start) :])
        with pytest.raises(UserError, match=r"it begins with"):
            GGUFFile(other)
    other.write_bytes(content[:16] + b"\xff" * 8 + content[24:])
    with pytest.raises(UserError, match="is it a whole GGUF file"):
        GGUFFile(other)
    with pytest.raises(UserError, match=r"path of an existing \.gguf file, got .*nowhere"):
        GGUFFile(tmp_path / "nowhere.gguf")
    with pytest.raises(UserError, match="cannot read"):
        GGUFFile(tmp_path)
