import json
import os
import pickle
import struct
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardopt.errors import CheckpointError
from shardopt.files import (
    TensorEntry,
    TensorFile,
    TensorFileWriter,
    dtype_name,
    in_file_order,
    is_pickled,
    tensor_file,
)
from shardopt.files.tensor_file import BLOCK_NBYTES, CHECKSUMS, DTYPES

SMALL = {
    "a": torch.arange(1, 7, dtype=torch.int16).view(2, 3),
    "b": torch.tensor(2.5),
    "c": torch.tensor([True, False, True]),
    "d": torch.zeros(0, 4),
}
METADATA = {"lr": 0.5}


def random_tensor(dtype, shape, seed):
    """Any bits, but in bools 0 or 1."""
    nbytes = prod(shape) * DTYPES[dtype][1]
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (nbytes,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(getattr(torch, dtype)).view(shape)


@st.composite
def states(draw, shapes=st.lists(st.integers(0, 4), max_size=3)):  # noqa: B008 - nothing changes it
    """Tensors by name."""
    names = draw(st.lists(st.text(max_size=4), max_size=4, unique=True))
    return {
        name: random_tensor(
            draw(st.sampled_from(list(DTYPES))), tuple(draw(shapes)), draw(st.integers(0, 9))
        )
        for name in names
    }


def entries_of(tensors):
    return in_file_order(
        TensorEntry(name, dtype_name(tensor), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def write(path, tensors, metadata=None, cut=lambda flat: [flat]):
    """Write a file anew, each tensor in the pieces into which ``cut`` cuts it."""
    path.unlink(missing_ok=True)
    entries = entries_of(tensors)
    writer = TensorFileWriter(path, entries, metadata)
    for entry in entries:
        for piece in cut(tensors[entry.name].view(-1)):
            writer.append(piece)
    writer.close()
    return path


def read(file, name, start=0, stop=None):
    """Elements of a tensor; random ones where it reads none."""
    entry = file.entries[name]
    stop = entry.numel if stop is None else stop
    flat = random_tensor(entry.dtype, (stop - start,), 0)
    file.read(name, start, flat)
    return flat


def read_all(path):
    with TensorFile(path) as file:
        file.verify()
        return {name: read(file, name).view(entry.shape) for name, entry in file.entries.items()}


def bits(tensor):
    """Dtype, shape and bytes."""
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


def assert_bitwise(found, expected):
    assert {name: bits(t) for name, t in found.items()} == {
        name: bits(t) for name, t in expected.items()
    }


def overwrite(path, at, raw):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(raw)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


# --- round trip -----------------------------------------------------------------------------------


@given(states(), st.integers(1, 40), st.lists(st.integers(0, 64), max_size=3).map(sorted))
def test_tensors_written_in_any_pieces_are_read_as_they_were(
    path, monkeypatch, tensors, block, places
):
    monkeypatch.setattr(tensor_file, "BLOCK_NBYTES", block)

    def cut(flat):
        ends = [0, *(min(place, len(flat)) for place in places), len(flat)]
        return [flat[start:stop] for start, stop in pairwise(ends)]

    assert_bitwise(read_all(write(path, tensors, cut=cut)), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(path, dtype):
    tensors = {"x": random_tensor(dtype, (2, 3), 0), "0-dim": random_tensor(dtype, (), 1)}
    assert_bitwise(read_all(write(path, tensors)), tensors)


def test_a_piece_can_be_of_several_entries(path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK_NBYTES", 8)
    tensors = {"a": torch.arange(3.0), "b": torch.arange(4.0), "c": torch.arange(2.0)}
    writer = TensorFileWriter(path, entries_of(tensors), None)
    for piece in torch.cat(list(tensors.values())).split([2, 6, 1]):
        writer.append(piece)
    writer.close()
    assert_bitwise(read_all(path), tensors)


@given(states(), st.integers(1, 40), st.data())
def test_a_range_that_is_read_is_exact(path, monkeypatch, tensors, block, data):
    monkeypatch.setattr(tensor_file, "BLOCK_NBYTES", block)
    with TensorFile(write(path, tensors)) as file:
        for name, tensor in tensors.items():
            ends = st.tuples(*[st.integers(0, tensor.numel())] * 2)
            start, stop = sorted(data.draw(ends))
            expected = tensor.view(-1)[start:stop]
            assert bits(read(file, name, start, stop)) == bits(expected)


@given(
    st.dictionaries(st.text(max_size=3), st.lists(st.one_of(st.none(), st.integers(), st.text())))
)
def test_metadata_come_back_as_they_were(path, metadata):
    with TensorFile(write(path, {}, metadata)) as file:
        assert (file.metadata, file.entries) == (metadata, {})


@given(states())
def test_entries_say_dtype_and_shape(path, tensors):
    with TensorFile(write(path, tensors)) as file:
        assert file.entries == {entry.name: entry for entry in entries_of(tensors)}
    for entry in entries_of(tensors):
        tensor = tensors[entry.name]
        assert (entry.numel, entry.itemsize) == (tensor.numel(), tensor.element_size())
        assert entry.nbytes == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e8m0fnu])
def test_a_dtype_that_the_format_lacks_is_named(dtype):
    with pytest.raises(TypeError, match=f"^dtype {dtype} cannot be written to a checkpoint$"):
        dtype_name(torch.empty(1, dtype=dtype))


# --- the format -----------------------------------------------------------------------------------


@given(states())
def test_safetensors_reads_the_tensors_and_one_of_checksums(path, tensors):
    found = load_file(write(path, tensors))
    checksums = found.pop(CHECKSUMS)
    assert_bitwise(found, tensors)
    assert (checksums.dtype, checksums.dim(), len(checksums) % 4) == (torch.uint8, 1, 0)


@given(states())
def test_files_of_safetensors_are_read(path, tensors):
    save_file(tensors, path)
    assert_bitwise(read_all(path), tensors)
    with TensorFile(path) as file:
        assert file.metadata is None


@given(states())
def test_every_tensor_starts_at_a_multiple_of_its_element(path, tensors):
    raw = write(path, tensors).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in tensors.items():
        start, stop = header[name]["data_offsets"]
        assert stop - start == tensor.numel() * tensor.element_size()
        assert (8 + length + start) % tensor.element_size() == 0


def test_equal_tensors_and_metadata_give_equal_files(path, tmp_path):
    other = write(tmp_path / "other", SMALL, METADATA)
    assert write(path, SMALL, METADATA).read_bytes() == other.read_bytes()


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [lambda tensors, path: write(path, tensors, METADATA), save_file])
def test_a_file_cut_short_anywhere_is_an_error(path, save):
    save(SMALL, path)
    whole = path.read_bytes()
    for nbytes in range(len(whole)):
        path.write_bytes(whole[:nbytes])
        with pytest.raises(CheckpointError) as raised:
            read_all(path)
        assert str(raised.value).startswith(f"{path}: ")


def test_a_file_cut_short_while_it_is_open_is_an_error(path):
    with TensorFile(write(path, {"a": torch.arange(9.0)})) as file:
        os.truncate(path, path.stat().st_size - 24)
        with pytest.raises(CheckpointError, match="cut short"):
            read(file, "a")


@pytest.mark.parametrize("block", [16, BLOCK_NBYTES])
def test_no_damaged_byte_goes_unnoticed(path, monkeypatch, block):
    """Each byte of the file, replaced by each other one."""
    monkeypatch.setattr(tensor_file, "BLOCK_NBYTES", block)
    whole = write(path, SMALL, METADATA).read_bytes()
    unnoticed = set()
    descriptor = os.open(path, os.O_WRONLY)
    for at, byte in enumerate(whole):
        for other in set(range(256)) - {byte}:
            os.pwrite(descriptor, bytes([other]), at)
            try:
                with TensorFile(path) as file:
                    file.verify()
            except CheckpointError:
                continue
            unnoticed.add(at)
        os.pwrite(descriptor, whole[at : at + 1], at)
    os.close(descriptor)
    assert {at: whole[at - 4 : at + 4] for at in sorted(unnoticed)} == {}


def test_a_range_is_damaged_exactly_where_one_of_its_blocks_is(path, monkeypatch):
    """Blocks of 8 bytes, so 4 elements: a damaged byte spoils those of its block, and no other."""
    monkeypatch.setattr(tensor_file, "BLOCK_NBYTES", 8)
    tensor = torch.arange(100, 111, dtype=torch.int16)
    whole = write(path, {"x": tensor}).read_bytes()
    data = whole.index(tensor.view(torch.uint8).numpy().tobytes())
    for at in range(2 * len(tensor)):
        overwrite(path, data, whole[data:])
        overwrite(path, data + at, bytes([whole[data + at] ^ 16]))
        with TensorFile(path) as file:
            for start in range(len(tensor)):
                for stop in range(start + 1, len(tensor) + 1):
                    if start // 4 <= at // 8 <= (stop - 1) // 4:
                        with pytest.raises(CheckpointError, match="'x' is damaged"):
                            read(file, "x", start, stop)
                    else:
                        assert torch.equal(read(file, "x", start, stop), tensor[start:stop])


def test_damage_in_a_large_tensor_is_noticed_in_the_ranges_that_it_is_in(path):
    numel = 3 * BLOCK_NBYTES // 4 + 5
    tensor = torch.arange(numel, dtype=torch.int32)
    write(path, {"x": tensor, "y": torch.ones(3)}, cut=lambda flat: flat.split(300_001))
    block = BLOCK_NBYTES // 4
    at = path.read_bytes().index(tensor[block + 9 : block + 99].numpy().tobytes())
    overwrite(path, at, b"\xff")
    with TensorFile(path) as file:
        for start, stop in [(block + 50, block + 51), (0, numel), (block - 1, block + 1)]:
            with pytest.raises(CheckpointError, match="'x' is damaged"):
                read(file, "x", start, stop)
        for start, stop in [(0, block), (2 * block, numel), (block - 1, block), (block, block)]:
            assert torch.equal(read(file, "x", start, stop), tensor[start:stop])
        assert torch.equal(read(file, "y"), torch.ones(3))
        with pytest.raises(CheckpointError, match="'x' is damaged"):
            file.verify()


def test_damage_is_noticed_with_the_name_of_file_and_tensor(path, monkeypatch):
    """Blocks of 4 bytes, one for each tensor."""
    monkeypatch.setattr(tensor_file, "BLOCK_NBYTES", 4)
    names = ["a", "b", "c"]
    data = write(path, {n: torch.tensor([1.0]) for n in names}).stat().st_size - 4 * (1 + 3 + 3)
    for number, name in enumerate(names):
        overwrite(path, data + 4 * number, b"\x07")
        with TensorFile(path) as file:
            for check in (file.verify, lambda file=file, name=name: read(file, name)):
                with pytest.raises(CheckpointError) as raised:
                    check()
                assert str(raised.value).startswith(f"{path}: {name!r} is damaged")
        overwrite(path, data + 4 * number, b"\x00")


# --- writing --------------------------------------------------------------------------------------


def test_what_is_abandoned_is_removed(path):
    writer = TensorFileWriter(path, [TensorEntry("x", "float32", (4,))], None)
    writer.append(torch.zeros(2))
    assert path.exists()
    writer.abandon()
    assert not path.exists()


def test_an_existing_file_is_not_overwritten(path):
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        TensorFileWriter(path, [], None)
    assert path.read_text() == "mine"


# --- foreign files --------------------------------------------------------------------------------

ENTRY = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
FOREIGN = {
    "empty": b"",
    "text": b"A text that is long enough for its first bytes to be a length.\n" * 9,
    "pickle": pickle.dumps({"state": list(range(99))}),
    "long": struct.pack("<Q", 2**63) + b"{}",
}
HEADERS = {
    "no JSON": b"{]",
    "no text": b'{"\xff": {}}',
    "a list": [],
    "null": None,
    "an entry that is no dict": {"x": [0, 2]},
    "no offsets": {"x": {"dtype": "U8", "shape": [2]}},
    "three offsets": {"x": {**ENTRY, "data_offsets": [0, 1, 2]}},
    "offsets of text": {"x": {**ENTRY, "data_offsets": ["0", "2"]}},
    "offsets backwards": {"x": {**ENTRY, "data_offsets": [2, 0]}},
    "an offset below 0": {"x": {**ENTRY, "data_offsets": [-2, 0]}},
    "another shape": {"x": {**ENTRY, "shape": [3]}},
    "a shape of text": {"x": {**ENTRY, "shape": ["2"]}},
    "no such dtype": {"x": {**ENTRY, "dtype": "U9"}},
    "a dtype of a list": {"x": {**ENTRY, "dtype": ["U8"]}},
    "metadata that are text": {"__metadata__": "x"},
    "metadata that are no JSON": {"__metadata__": {"shardopt": "{"}},
    "no checksums": {CHECKSUMS: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
    "other checksums": {CHECKSUMS: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}},
}


@pytest.mark.parametrize("raw", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_an_error_that_names_it(path, raw):
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="no file of tensors, or cut short") as raised:
        TensorFile(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_makes_no_sense_is_an_error_that_names_the_file(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError) as raised:
        TensorFile(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickled_file_is_no_file_of_tensors(path, legacy):
    torch.save(SMALL, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match="no file of tensors"):
        TensorFile(path)
    assert is_pickled(path)


def test_what_is_no_file_is_named(path, tmp_path):
    missing = f"{path}: cannot be read: No such file or directory"
    folder = f"{tmp_path}: cannot be read: Is a directory"
    for read_, wrong, text in [
        (TensorFile, path, missing),
        (is_pickled, path, missing),
        (TensorFile, tmp_path, folder),
    ]:
        with pytest.raises(CheckpointError) as raised:
            read_(wrong)
        assert str(raised.value) == text


def test_only_files_of_torch_save_are_pickled(path, tmp_path):
    assert not is_pickled(write(path, SMALL))
    assert not is_pickled(tmp_path)
    for raw in (b"", b"P", b"PK", b"a text", b"\x80"):
        path.write_bytes(raw)
        assert not is_pickled(path)
