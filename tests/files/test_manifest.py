import json
import os
from stat import S_ISDIR
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.errors import CheckpointError
from shardopt.files import commit, file_name, read_manifest, remove_others, sync_folder

NAME = "checkpoint.json"
CONTENTS = {"version": 1, "files": {"0": "a-rank00000.safetensors"}, "x": [1.5, None, "\n\u00e4"]}

plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)
)
contents = st.dictionaries(
    st.text(max_size=3),
    st.recursive(plain, lambda items: st.lists(items, max_size=3), max_leaves=5),
    max_size=4,
)


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def write_outer(folder, text, **changes):
    """Write a manifest whose checksum is that of its text."""
    outer = {"crc32": crc32(text.encode()), "contents": text, **changes}
    (folder / NAME).write_text(json.dumps(outer))


# --- commit ---------------------------------------------------------------------------------------


@given(contents)
def test_what_was_committed_is_read(tmp_path, contents):
    commit(tmp_path, contents)
    assert read_manifest(tmp_path) == contents


@given(contents, contents)
def test_the_last_commit_counts(tmp_path, one, other):
    commit(tmp_path, one)
    commit(tmp_path, other)
    assert read_manifest(tmp_path) == other


def test_a_commit_leaves_nothing_but_the_manifest(tmp_path):
    commit(tmp_path, {"a": 1})
    commit(tmp_path, CONTENTS)
    assert listed(tmp_path) == [NAME]


def test_the_old_manifest_is_current_until_it_is_replaced_by_a_whole_one(tmp_path, monkeypatch):
    commit(tmp_path, {"a": "old"})
    seen = []
    replace = os.replace

    def watched(source, target):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / NAME).write_bytes(source.read_bytes())
        seen.append((read_manifest(tmp_path), read_manifest(elsewhere)))
        replace(source, target)
        seen.append(read_manifest(tmp_path))

    monkeypatch.setattr(os, "replace", watched)
    commit(tmp_path, CONTENTS)
    assert seen == [({"a": "old"}, CONTENTS), CONTENTS]


def test_contents_are_on_the_disk_before_the_move_and_the_move_is_after_it(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor):
        facts = os.fstat(descriptor)
        calls.append("folder" if S_ISDIR(facts.st_mode) else ("file", facts.st_size))
        fsync(descriptor)

    def watched_replace(source, target):
        calls.append(("replace", source.stat().st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    commit(tmp_path, CONTENTS)
    nbytes = (tmp_path / NAME).stat().st_size
    assert calls == [("file", nbytes), ("replace", nbytes)]
    sync_folder(tmp_path)
    assert calls[2:] == ["folder"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_commit_that_fails_leaves_the_old_manifest_current(tmp_path, monkeypatch, name):
    commit(tmp_path, {"a": "old"})

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, name, fails)
    with pytest.raises(OSError, match="disk full"):
        commit(tmp_path, CONTENTS)
    assert read_manifest(tmp_path) == {"a": "old"}


def test_what_a_killed_commit_has_left_does_not_get_in_the_way(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: None)
        commit(tmp_path, {"a": "a longer text than that of the contents that follow it" * 9})
    assert listed(tmp_path) != []
    commit(tmp_path, CONTENTS)
    assert (read_manifest(tmp_path), listed(tmp_path)) == (CONTENTS, [NAME])


def test_contents_that_are_no_json_change_nothing(tmp_path):
    commit(tmp_path, {"a": "old"})
    with pytest.raises(TypeError):
        commit(tmp_path, {"a": object()})
    assert (read_manifest(tmp_path), listed(tmp_path)) == ({"a": "old"}, [NAME])


# --- read_manifest --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "missing"])
def test_a_missing_manifest_is_named(tmp_path, folder):
    with pytest.raises(CheckpointError) as raised:
        read_manifest(tmp_path / folder)
    path = tmp_path / folder / NAME
    assert str(raised.value).startswith(f"{path}: cannot be read: No such file or directory")
    assert "expected a folder that save() has written" in str(raised.value)


def test_a_manifest_that_was_cut_short_anywhere_is_an_error(tmp_path):
    commit(tmp_path, CONTENTS)
    whole = (tmp_path / NAME).read_bytes()
    for nbytes in range(len(whole)):
        (tmp_path / NAME).write_bytes(whole[:nbytes])
        with pytest.raises(CheckpointError, match="damaged") as raised:
            read_manifest(tmp_path)
        assert str(raised.value).startswith(f"{tmp_path / NAME}: ")


def test_no_flipped_bit_changes_what_is_read(tmp_path):
    commit(tmp_path, CONTENTS)
    whole = (tmp_path / NAME).read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            flipped = bytes([whole[at] ^ (1 << bit)])
            (tmp_path / NAME).write_bytes(whole[:at] + flipped + whole[at + 1 :])
            try:
                found = read_manifest(tmp_path)
            except CheckpointError:
                continue
            assert found == CONTENTS  # white space between the tokens of JSON means nothing


@pytest.mark.parametrize("crc", [0, -1, None, "0", 1.5])
def test_another_checksum_is_an_error(tmp_path, crc):
    write_outer(tmp_path, json.dumps(CONTENTS), crc32=crc)
    with pytest.raises(CheckpointError, match="damaged: its checksum is not what it was"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"no JSON",
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"{}",
        b'{"crc32": 0}',
        b'{"contents": "{}"}',
        b'{"contents": 3, "crc32": 0}',
        b'{"contents": {"version": 1}, "crc32": 0}',
    ],
)
def test_a_foreign_file_is_an_error_that_names_it(tmp_path, raw):
    (tmp_path / NAME).write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged, or no manifest of shardopt") as raised:
        read_manifest(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / NAME}: ")


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "null", "3"])
def test_contents_that_are_no_dict_are_an_error_whatever_the_checksum(tmp_path, text):
    write_outer(tmp_path, text)
    with pytest.raises(CheckpointError, match="damaged, or no manifest of shardopt"):
        read_manifest(tmp_path)


# --- rank files -----------------------------------------------------------------------------------


def test_the_name_of_a_file_says_save_and_rank():
    assert file_name("0a1b2c3d", 3) == "0a1b2c3d-rank00003.safetensors"


def test_names_of_saves_and_ranks_differ_and_ranks_stand_in_order():
    names = [file_name(save, rank) for save in ("a", "b") for rank in (0, 9, 10, 12345, 99999)]
    assert names == sorted(set(names))


def touch(folder, names):
    for name in names:
        (folder / name).touch()


def test_files_of_other_saves_are_removed(tmp_path):
    current = {file_name("0a1b2c3d", rank) for rank in range(3)}
    others = {file_name(save, rank) for save in ("00000000", "ffffffff") for rank in (0, 123456)}
    touch(tmp_path, current | others | {file_name("0a1b2c3d", 3)})
    remove_others(tmp_path, current)
    assert set(listed(tmp_path)) == current


@pytest.mark.parametrize(
    "name",
    [
        NAME,
        f".{NAME}.new",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "0a1b2c3d-rank00000.safetensors.backup",
        "0a1b2c3d-rank00000.pt",
        "lora-rank16.safetensors",
        "lora-rank16-final.safetensors",
    ],
)
def test_files_that_save_does_not_write_stay(tmp_path, name):
    touch(tmp_path, [name, file_name("ffffffff", 0)])
    remove_others(tmp_path, set())
    assert listed(tmp_path) == [name]


def test_files_in_folders_within_stay(tmp_path):
    (tmp_path / "older").mkdir()
    touch(tmp_path / "older", [file_name("ffffffff", 0)])
    remove_others(tmp_path, set())
    assert listed(tmp_path / "older") == [file_name("ffffffff", 0)]


def test_named_files_need_not_be_there(tmp_path):
    remove_others(tmp_path, {file_name("ffffffff", 0)})
    assert listed(tmp_path) == []
