"""Two ends of one file, both in this process: the owner and a peer that maps it."""

import gc
import os
from mmap import PAGESIZE
from unittest import mock

import pytest
import torch

from shardopt.collectives import shared_file
from shardopt.collectives.shared_file import Address, PeerFile, SharedFile


@pytest.fixture
def file():
    return SharedFile(3)


@pytest.fixture
def peer(file):
    return PeerFile(file.address, rank=2, world_size=3)


def new_piece(file, nbytes):
    """A piece as a tensor of bytes, which keeps it alive."""
    memory = file.new_piece(nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


def test_a_piece_has_room_in_whole_pages(file):
    assert [len(new_piece(file, nbytes)) for nbytes in (1, PAGESIZE, PAGESIZE + 1)] == [
        PAGESIZE,
        PAGESIZE,
        2 * PAGESIZE,
    ]


def test_what_the_owner_writes_a_peer_reads(file, peer):
    pieces = [new_piece(file, 5), new_piece(file, 3 * PAGESIZE)]
    for value, piece in enumerate(pieces, 7):
        piece.fill_(value)
    for value, piece in enumerate(pieces, 7):
        seen = torch.frombuffer(peer.memory(file.find(piece.data_ptr())), dtype=torch.uint8)
        assert seen.tolist() == [value] * len(piece)


def test_a_peer_sees_what_is_written_after_it_has_mapped_a_piece(file, peer):
    piece = new_piece(file, 8)
    place = file.find(piece.data_ptr())
    seen = torch.frombuffer(peer.memory(place), dtype=torch.uint8)
    piece[3] = 5
    assert seen[3] == 5


def test_an_address_within_a_piece_is_found_with_its_start(file):
    new_piece(file, 8)
    piece = new_piece(file, 2 * PAGESIZE)
    place = file.find(piece[17:].data_ptr())
    assert (place.start, place.nbytes) == (17, 2 * PAGESIZE)


def test_memory_elsewhere_is_not_found(file):
    new_piece(file, 8)
    assert file.find(torch.ones(3).data_ptr()) is None


def test_what_was_sent_nowhere_is_read(file):
    assert file.is_read(new_piece(file, 8).data_ptr())


def test_memory_elsewhere_is_read(file):
    assert file.is_read(torch.ones(3).data_ptr())


def test_a_piece_is_read_once_each_rank_has_read_it_as_often_as_it_was_announced(file):
    peers = {rank: PeerFile(file.address, rank=rank, world_size=3) for rank in (0, 2)}
    piece = new_piece(file, 8)
    place = file.find(piece.data_ptr())
    for rank in (0, 2, 2):
        file.note_sent(piece.data_ptr(), rank=rank)
    seen = []
    for rank in (2, 0, 2):
        seen.append(file.is_read(piece.data_ptr()))
        peers[rank].mark_read(place)
    assert (seen, file.is_read(piece.data_ptr())) == ([False] * 3, True)


def test_pieces_are_read_one_by_one(file, peer):
    pieces = [new_piece(file, 8), new_piece(file, 8)]
    for piece in pieces:
        file.note_sent(piece.data_ptr(), rank=2)
    peer.mark_read(file.find(pieces[1].data_ptr()))
    assert [file.is_read(piece.data_ptr()) for piece in pieces] == [False, True]


def num_bytes(file):
    return os.fstat(file.address.file_descriptor).st_size


def test_memory_that_nobody_refers_to_is_used_again(file):
    large, small = new_piece(file, 3 * PAGESIZE), new_piece(file, PAGESIZE)
    nbytes = num_bytes(file)
    del large, small
    gc.collect()
    kept = [new_piece(file, PAGESIZE), new_piece(file, 2 * PAGESIZE)]
    assert (num_bytes(file), [len(piece) for piece in kept]) == (nbytes, [PAGESIZE, 3 * PAGESIZE])


def test_pages_that_nobody_refers_to_are_let_go(file):
    piece = new_piece(file, 50 * PAGESIZE).fill_(1)
    before = os.fstat(file.address.file_descriptor).st_blocks
    del piece
    gc.collect()
    after = os.fstat(file.address.file_descriptor).st_blocks
    assert (before - after) * 512 >= 49 * PAGESIZE  # a page of counts may have come
    assert new_piece(file, 50 * PAGESIZE).max() == 0


def test_memory_that_is_still_to_be_read_is_not_used_again(file, peer):
    piece = new_piece(file, PAGESIZE).fill_(1)
    file.note_sent(piece.data_ptr(), rank=2)
    place = file.find(piece.data_ptr())
    del piece
    gc.collect()
    new_piece(file, PAGESIZE).fill_(2)
    assert torch.frombuffer(peer.memory(place), dtype=torch.uint8).max() == 1


def test_memory_that_was_read_since_is_used_again(file, peer):
    piece = new_piece(file, PAGESIZE)
    file.note_sent(piece.data_ptr(), rank=2)
    place = file.find(piece.data_ptr())
    del piece
    gc.collect()
    peer.mark_read(place)
    assert file.find(new_piece(file, PAGESIZE).data_ptr()) == place


def test_a_piece_that_is_used_again_has_been_read(file, peer):
    """Counts of its first life do not matter in its second."""
    for _ in range(2):
        piece = new_piece(file, PAGESIZE)
        assert file.is_read(piece.data_ptr())
        file.note_sent(piece.data_ptr(), rank=2)
        assert not file.is_read(piece.data_ptr())
        peer.mark_read(file.find(piece.data_ptr()))
        del piece
        gc.collect()


def test_there_is_room_for_so_many_pieces_only(file, monkeypatch):
    monkeypatch.setattr(shared_file, "MAX_PIECES", 2)
    kept = [new_piece(file, 1) for _ in range(2)]
    with pytest.raises(OSError, match="2 pieces of shared memory are in use"):
        new_piece(file, 1)
    assert len(kept) == 2


def test_a_forked_child_leaves_the_memory_of_its_parent_alone(file):
    piece = new_piece(file, PAGESIZE).fill_(1)
    place = file.find(piece.data_ptr())
    with mock.patch.object(os, "getpid", return_value=1):
        del piece
        gc.collect()
    seen = torch.frombuffer(
        PeerFile(file.address, rank=0, world_size=3).memory(place), dtype=torch.uint8
    )
    assert seen.min() == 1


def test_large_pieces_stay_readable_though_their_pages_are_let_go(file, peer, monkeypatch):
    monkeypatch.setattr(shared_file, "KEPT_NBYTES", PAGESIZE)
    piece = new_piece(file, 2 * PAGESIZE).fill_(1)
    place = file.find(piece.data_ptr())
    seen = torch.frombuffer(peer.memory(place), dtype=torch.uint8)
    for value in (1, 2):
        piece.fill_(value)
        file.note_sent(piece.data_ptr(), rank=2)
        assert (seen.min(), seen.max()) == (value, value)
        peer.mark_read(place)
    assert file.is_read(piece.data_ptr())


def test_a_peer_reads_on_when_the_owner_has_let_go(file, peer):
    piece = new_piece(file, 8).fill_(3)
    place = file.find(piece.data_ptr())
    file.note_sent(piece.data_ptr(), rank=2)
    del piece, file
    gc.collect()
    assert torch.frombuffer(peer.memory(place), dtype=torch.uint8)[0] == 3


def test_files_are_closed_with_their_ends():
    own = SharedFile(2)
    theirs = PeerFile(own.address, rank=1, world_size=2)
    descriptors = [own.address.file_descriptor, theirs._descriptor]
    del own, theirs
    gc.collect()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


# --- peers that cannot be read --------------------------------------------------------------------


def test_a_file_of_another_host_is_refused(file):
    with pytest.raises(OSError, match="on another host"):
        PeerFile(file.address._replace(host="elsewhere"), rank=0, world_size=3)


def test_a_file_of_another_process_of_the_same_number_is_refused(file):
    """As in another container, where process numbers mean other processes."""
    with pytest.raises(OSError, match="is not the file of the peer"):
        PeerFile(file.address._replace(random_bytes=bytes(16)), rank=0, world_size=3)


def test_a_process_that_is_not_there_is_refused(file):
    with pytest.raises(FileNotFoundError):
        PeerFile(file.address._replace(pid=2**22 + 1), rank=0, world_size=3)


def test_an_address_can_be_sent(file):
    assert Address(*tuple(file.address)) == file.address
