"""Files that are kept: what another user could have written is not believed, locks empty nothing, losses cost time."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
import time

import pytest

from draftproof import files
from draftproof.errors import UserError, printable
from draftproof.files import Store, locked, make_folders, own_folder, remove_leftovers, why_distrusted

ROOT = os.getuid() == 0
OTHER = 12_345  # id of a user that is not this one
as_root = pytest.mark.skipif(not ROOT, reason="only root can give files away")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home below a folder that a test may open to others."""
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "above" / "home"))
    return tmp_path / "above" / "home"


def write(text):
    return lambda path: path.write_text(text, encoding="utf-8")


# --- who may have written a file --------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    """A file two folders deep, each closed to others."""
    folder = tmp_path / "above" / "folder"
    make_folders(folder)
    (folder / "file").write_text("x")
    (folder / "file").chmod(0o600)
    return folder / "file"


MODES = {
    "the file": (lambda place: place, 0o666, "can be written by others"),
    "the file by its group": (lambda place: place, 0o620, "can be written by others"),
    "the folder": (lambda place: place.parent, 0o777, "is in .*/folder, which can be written by others"),
    "the folder above": (lambda place: place.parent.parent, 0o777, "is in .*/above, which can be written by others"),
}


@pytest.mark.parametrize("which", MODES)
def test_what_others_can_write_is_not_believed(which, place):
    assert why_distrusted(place) is None
    part, mode, message = MODES[which]
    part(place).chmod(mode)

    assert re.search(message, why_distrusted(place))


def test_nobody_exchanges_files_in_a_sticky_folder(place):
    place.parent.parent.chmod(0o1777)
    assert why_distrusted(place) is None


@as_root
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_belongs_to_another_user_is_not_believed(depth, place):
    part = [place, *place.parents][depth]
    os.chown(part, OTHER, OTHER)
    assert "belongs to another user" in why_distrusted(place)
    os.chown(part, 0, 0)
    assert why_distrusted(place) is None


@as_root
def test_a_group_of_others_may_not_write_and_a_group_of_ones_own_may(place):
    os.chown(place.parent, -1, OTHER)
    place.parent.chmod(0o775)
    assert "can be written by others" in why_distrusted(place, strict=False)
    os.chown(place.parent, -1, 0)
    assert why_distrusted(place, strict=False) is None


def test_links_are_followed_before_anything_is_checked(place, tmp_path):
    (tmp_path / "link").symlink_to(place.parent, target_is_directory=True)
    assert why_distrusted(tmp_path / "link" / "file") is None
    place.parent.chmod(0o777)
    assert "can be written by others" in why_distrusted(tmp_path / "link" / "file")
    with pytest.raises(FileNotFoundError):
        why_distrusted(tmp_path / "nowhere")


def test_folders_are_closed_to_others_whatever_the_umask_is(tmp_path):
    before = os.umask(0)
    try:
        make_folders(tmp_path / "a" / "b")
        assert own_folder(tmp_path / "c" / "d") is not None
    finally:
        os.umask(before)
    assert not any((tmp_path / each).stat().st_mode & 0o022 for each in ("a", "a/b", "c", "c/d"))
    assert (tmp_path / "c" / "d").stat().st_mode & 0o077 == 0


# --- the store --------------------------------------------------------------------------------------------------------


def test_what_was_kept_is_found_under_its_key_and_version(home):
    store = Store("things", [1, "code"])
    name = store.name({"a": 1}, ".json")
    assert store.find(name) is None
    assert not home.exists(), "looking makes nothing"
    path = store.keep(name, write('{"b": 2}'))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert store.json(name) == {"b": 2}
    assert store.names("*.json") == [name]
    assert Store("things", [2, "code"]).name({"a": 1}, ".json") != name
    store.remove(name)
    store.remove(name)
    assert store.json(name) is None


def test_a_home_that_is_a_link_works(home, tmp_path):
    (tmp_path / "real").mkdir(mode=0o755)
    make_folders(home.parent)
    home.symlink_to(tmp_path / "real", target_is_directory=True)
    store = Store("things")
    assert store.keep("a", write("1")) == tmp_path / "real" / "things" / "a"
    assert store.text("a") == "1"


def test_a_home_that_cannot_be_written_is_said_once(home, tmp_path, monkeypatch, caplog):
    assert not home.exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "file" / "home"))
    for folder in ("things", "others"):
        assert own_folder(Store(folder).folder) is None
        assert Store(folder).keep("a", write("1")) is None
    (said,) = caplog.messages
    assert re.search(r"things cannot be written \(Not a directory\), so .* set DRAFTPROOF_HOME to a writable", said)


def test_what_cannot_be_kept_is_said_once_for_each_reason(home, caplog):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for folder in ("things", "others"):
        assert Store(folder).keep("a", full) is None
        assert Store(folder).keep("b", full) is None
    (said,) = caplog.messages
    assert str(home / "things") in said
    assert "(No space left on device)" in said


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_nothing_is_taken_or_kept_below_a_folder_that_others_can_write(mode, home, caplog):
    store = Store("things")
    store.keep("a", write("1"))
    home.parent.chmod(mode)
    assert store.text("a") is None
    assert store.keep("b", write("2")) is None
    assert "can be written by others" in caplog.text
    assert "DRAFTPROOF_HOME" in caplog.text
    home.parent.chmod(0o755)
    assert (store.text("a"), store.text("b")) == ("1", None)


def test_a_folder_of_another_user_is_left_alone(home, monkeypatch, caplog):
    store = Store("things")
    store.keep("a", write("1"))
    real = os.getuid()
    monkeypatch.setattr(files.os, "getuid", lambda: real + 1)
    assert store.text("a") is None
    assert store.keep("a", write("2")) is None
    assert "belongs to another user" in caplog.text
    assert (home / "things" / "a").read_text() == "1"


def test_the_temporary_folder_of_a_user_without_a_home_may_be_anothers(monkeypatch, tmp_path, caplog):
    """Anybody can make `draftproof-UID` below `/tmp` first."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("DRAFTPROOF_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(files.Path, "home", no_home)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    made = tmp_path / f"draftproof-{os.getuid()}"
    made.mkdir(mode=0o777)
    made.chmod(0o777)
    (made / "things").mkdir(mode=0o700)
    (made / "things" / "a").write_text("planted")
    (made / "things" / "a").chmod(0o600)
    assert Store("things").text("a") is None
    made.chmod(0o755)
    assert Store("things").text("a") == "planted", "a control: it is the mode that matters"


BROKEN = {
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "empty": b"",
    "a huge number": b"9" * 5000,
}


@pytest.mark.parametrize("content", BROKEN)
def test_no_content_raises(content, home):
    store = Store("things")
    store.keep("a", lambda path: path.write_bytes(BROKEN[content]))
    assert store.json("a") is None


def test_what_is_no_file_raises_nothing(home, tmp_path):
    store = Store("things")
    store.keep("a", write("1"))
    (home / "things" / "folder").mkdir()
    (home / "things" / "circle").symlink_to(home / "things" / "circle")
    (home / "things" / "nowhere").symlink_to(tmp_path / "nowhere")
    assert [store.text(name) for name in ("folder", "circle", "nowhere", "a")] == [None, None, None, "1"]


def test_a_disk_that_is_full_costs_the_time_only(home):
    def full(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    store = Store("things")
    assert store.keep("a", full) is None
    assert list((home / "things").iterdir()) == []


def test_the_oldest_go_by_number_and_by_bytes(home):
    store = Store("things", most=3, most_bytes=1000)
    for number in range(5):
        path = store.keep(f"{number}", write("x"))
        os.utime(path, (number + 1, number + 1))
    assert store.names("*") == ["2", "3", "4"]
    os.utime(home / "things" / "2", (9, 9))
    store.keep("large", write("x" * 999))
    assert store.names("*") == ["2", "large"]
    store.keep("larger", write("x" * 2000))
    assert store.names("*") == ["larger"], "what was just written stays"


def test_looking_at_a_file_makes_it_the_newest(home):
    store = Store("things", most=2)
    for name in ("old", "new"):
        os.utime(store.keep(name, write(name)), (5, 5))
    assert store.text("old") == "old"
    store.keep("third", write("3"))
    assert store.names("*") == ["old", "third"]


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(home):
    store = Store("things")
    store.keep("a", write("1"))
    folder = home / "things"
    old, young, hidden = (folder / f".{name}" for name in ("a." + "0" * 32, "a." + "1" * 32, "kept-by-the-user"))
    for each in (old, young, hidden):
        each.write_text("half")
    for each in (old, hidden):
        os.utime(each, (1, 1))
    store.keep("b", write("2"))
    assert sorted(path.name for path in folder.iterdir()) == sorted([young.name, hidden.name, "a", "b"])


def test_a_process_that_is_killed_while_it_writes_leaves_something_that_is_removed(tmp_path):
    code = (
        "import sys, os, signal; from pathlib import Path; from draftproof.files import whole_file, whole_directory\n"
        "with whole_directory(Path(sys.argv[1]) / 'model'), whole_file(Path(sys.argv[1]) / 'file') as work:\n"
        "    work.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path, "model")
    assert len(list(tmp_path.iterdir())) == 2, "a process may be at work"
    remove_leftovers(tmp_path, "mod", seconds=-1.0)
    assert len(list(tmp_path.iterdir())) == 2, "another name"
    remove_leftovers(tmp_path, "model", seconds=-1.0)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".file.")
    remove_leftovers(tmp_path, "", seconds=-1.0)
    assert list(tmp_path.iterdir()) == []


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_empties_nothing(tmp_path):
    (tmp_path / "lock").write_text("kept")
    with locked(tmp_path / "lock", lambda: None):
        pass
    assert (tmp_path / "lock").read_text() == "kept"


IN_THE_PLACE = {
    "a link": lambda path, precious: path.symlink_to(precious),
    "a link to nowhere": lambda path, precious: path.symlink_to(precious.with_name("nowhere")),
    "a folder": lambda path, _: path.mkdir(),
    "a pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_is_no_file_is_no_lock(what, tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    IN_THE_PLACE[what](tmp_path / "lock", precious)
    start = time.monotonic()
    with (
        pytest.raises(UserError, match="is no file, and it is needed as a lock: remove it"),
        locked(tmp_path / "lock", lambda: None),
    ):
        pass
    assert time.monotonic() - start < 5
    assert precious.read_text() == "precious"
    assert not precious.with_name("nowhere").exists()
    path = tmp_path / "lock"
    assert stat.S_IFMT(path.lstat().st_mode) != stat.S_IFREG, "it is left as it is"


def test_words_of_strangers_do_not_control_a_terminal():
    assert printable("\x1b[2J\x07a\u202eb\u200b é\x9b") == r"\x1b[2J\x07a\u202eb\u200b é\x9b"
    assert json.loads(json.dumps(printable("plain"))) == "plain"
