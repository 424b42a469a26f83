"""Blocks read past the page cache: the same bytes as a buffered read whatever the file system says, does, or forgets to do."""

import mmap
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from storage_double import EINVAL, EIO, Faulty

from predmoe.config import ConfigError
from predmoe.engine import storage
from predmoe.engine.storage import BUFFERED, DIRECT, Alignment, BlockFile, Buffers, ReadError, alignment_of

SIZE = 40 * 4096 + 777   # the file's end is not aligned


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "blocks.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes())
    return path


def opened(path, **more):
    said = []
    return BlockFile(path, announce=said.append, **more), said


def block(opened_file, offset, length):
    buffers = Buffers(1, opened_file.room(length), max(4096, opened_file.alignment.memory))
    return bytes(opened_file.read(offset, length, buffers.array(0)))


def direct_or_skip(path):
    reader, _ = opened(path)
    if reader.mode != DIRECT:
        pytest.skip(f"this file system has no direct reads: {reader.why}")
    return reader


@pytest.mark.parametrize("offset, length", [(0, 4096), (8192, 3 * 4096), (100, 50), (4095, 2), (39 * 4096, 4096 + 777), (SIZE - 1, 1), (5000, 20_000)])
@pytest.mark.parametrize("direct", [True, False])
def test_bytes_equal_a_buffered_read_wherever_the_block_lies(file, offset, length, direct):
    reader, _ = opened(file, direct=direct)
    assert block(reader, offset, length) == file.read_bytes()[offset : offset + length]
    reader.close()


def test_direct_reads_are_direct_where_they_can_be_had(file):
    reader = direct_or_skip(file)
    assert reader.why in ("as the kernel says", "as tried") and reader.alignment.offset >= 512
    told = alignment_of(os.open(file, os.O_RDONLY))
    assert told is None or told == reader.alignment


def test_a_coarser_alignment_than_the_blocks_keeps_direct_reads_on(file, monkeypatch):
    """warp#4: 4096-aligned blocks on a device that wants 16384."""
    direct_or_skip(file)
    seen = []

    def preadv(descriptor, buffers, offset):
        seen.append((offset, len(buffers[0]), buffers[0].ctypes.data))
        return os.preadv(descriptor, buffers, offset)

    monkeypatch.setattr(storage, "alignment_of", lambda descriptor: Alignment(16384, 16384))
    reader, said = opened(file, preadv=preadv)
    assert reader.mode == DIRECT and not said
    for offset, length in ((4096, 4096), (3 * 4096, 8192), (36 * 4096, 4 * 4096 + 777)):
        assert block(reader, offset, length) == file.read_bytes()[offset : offset + length]
    assert all(offset % 16384 == 0 and size % 16384 == 0 and address % 16384 == 0 for offset, size, address in seen)


@pytest.mark.parametrize("told, why", [
    (Alignment(0, 0), "does not offer direct reads"),
    (Alignment(4096, 4096), "an aligned read of 4096 bytes failed"),
    (None, "an aligned read of 4096 bytes failed"),
])
def test_buffered_reads_are_announced_and_recorded(file, monkeypatch, told, why):
    """seastar#3518: a file system that accepts the flag and refuses the read, or says that it cannot."""
    monkeypatch.setattr(storage, "alignment_of", lambda descriptor: told)
    reader, said = opened(file, preadv=Faulty(errors={1: EINVAL} if told != Alignment(0, 0) else {}))
    assert reader.mode == BUFFERED and why in reader.why
    assert len(said) == 1 and "BUFFERED" in said[0] and why in said[0]
    assert block(reader, 4096, 4096) == file.read_bytes()[4096:8192]


def test_tmpfs_is_read_one_way_or_the_other_and_says_which():
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("there is no /dev/shm")
    path = folder / f"predmoe-test-{os.getpid()}"
    try:
        path.write_bytes(bytes(range(256)) * 64)
        reader, said = opened(path)
        assert block(reader, 4096, 4096) == bytes(range(256)) * 16
        assert (reader.mode == BUFFERED) == bool(said)
    finally:
        path.unlink(missing_ok=True)


def test_a_direct_read_that_is_refused_later_falls_back_and_says_so(file):
    direct_or_skip(file)
    reader, said = opened(file, preadv=Faulty(errors={3: EINVAL}))
    for offset in (0, 4096, 8192):
        assert block(reader, offset, 4096) == file.read_bytes()[offset : offset + 4096]
    assert reader.mode == BUFFERED and len(said) == 1 and "while running" in said[0]


@pytest.mark.parametrize("short", [4096, 5000, 1])
def test_short_reads_are_gone_on_with(file, short):
    """colibri#236. A direct read may end anywhere; the next one has to begin aligned, so one that never brings a whole step cannot be mended."""
    reader, _ = opened(file, direct=False, preadv=Faulty(short=short))
    assert block(reader, 4096, 3 * 4096) == file.read_bytes()[4096 : 4 * 4096]
    reader, _ = opened(file)
    if reader.mode == DIRECT and short >= reader.alignment.offset:
        reader._preadv = Faulty(short=short // reader.alignment.offset * reader.alignment.offset)
        assert block(reader, 4096, 3 * 4096) == file.read_bytes()[4096 : 4 * 4096]


def test_an_error_once_is_tried_again_and_counted_always_is_told(file):
    reader, _ = opened(file, preadv=Faulty(errors={2: EIO}))
    assert block(reader, 0, 4096) == file.read_bytes()[:4096] and reader.retried == (1 if reader.mode == DIRECT else 0)
    reader, _ = opened(file, direct=False, preadv=Faulty(errors={"always": EIO, 1: EIO}))
    with pytest.raises(ReadError, match="blocks.bin: reading 4096 bytes at 8192 failed: Input/output error"):
        block(reader, 8192, 4096)
    assert reader.retried == 1 and reader.reads == 0


def test_a_file_cut_short_while_it_is_open_names_both_counts(tmp_path):
    path = tmp_path / "cut.bin"
    path.write_bytes(bytes(5 * 4096))
    for direct in (True, False):
        reader, _ = opened(path, direct=direct)
        os.truncate(path, 3 * 4096 + 10)
        with pytest.raises(ReadError, match="10 bytes of 4096 at 12288, then the file ends: it was cut short"):
            block(reader, 3 * 4096, 4096)
        with pytest.raises(ReadError, match="0 bytes of 4096 at 16384"):
            block(reader, 4 * 4096, 4096)
        os.truncate(path, 5 * 4096)


def test_a_file_that_is_deleted_while_it_is_open_can_be_read_on(tmp_path):
    path = tmp_path / "gone.bin"
    path.write_bytes(b"x" * 8192)
    reader, _ = opened(path)
    path.unlink()
    assert block(reader, 4096, 4096) == b"x" * 4096


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="none.bin: No such file or directory"):
        BlockFile(tmp_path / "none.bin")


def test_threads_share_a_file(file):
    reader, _ = opened(file)
    whole, wrong = file.read_bytes(), []

    def read(seed):
        for page in np.random.default_rng(seed).integers(0, 40, 50):
            if block(reader, int(page) * 4096, 4096) != whole[page * 4096 : (page + 1) * 4096]:
                wrong.append(page)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and reader.reads == 200 and reader.bytes == 200 * 4096


@pytest.mark.parametrize("alignment", [4096, 16384])
def test_buffers_are_aligned_apart_and_no_more_than_asked_for(alignment):
    buffers = Buffers(3, 5000, alignment)
    addresses = [buffers.array(i).ctypes.data for i in range(3)]
    assert all(address % alignment == 0 for address in addresses) and np.diff(addresses).tolist() == [buffers.stride] * 2
    assert buffers.bytes == 3 * buffers.stride and buffers.stride >= 5000
    buffers.array(0)[:] = 7
    assert not buffers.array(1).any()


def test_large_buffers_ask_for_huge_pages_and_take_no_more_memory_than_they_have():
    buffers = Buffers(50, 111_000, 4096)
    address, parts, now = buffers.array(0).ctypes.data, {}, None
    for line in Path("/proc/self/smaps").read_text().splitlines():   # the mapping is in parts, one of which asks for them
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            now = (low, high) if low < address + buffers.bytes and high > address else None
        elif now:
            name, value = line.split(":", 1)
            parts.setdefault(now, {})[name] = value.strip()
    assert address % (2 << 20) == 0 and not buffers.whole.any()
    assert any("hg" in part["VmFlags"].split() for part in parts.values()) or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert sum(int(part["Rss"].split()[0]) for part in parts.values()) * 1024 <= buffers.bytes + 4096


def test_memory_that_cannot_be_had_is_one_sentence(monkeypatch):
    def none(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none)
    with pytest.raises(ConfigError, match=r"no memory for 1000 expert buffers of 8192 bytes \(8 MB\): .*Cannot allocate memory; take a smaller cache"):
        Buffers(1000, 8192, 4096)
