"""Reading blocks of a file past the page cache: aligned direct reads into aligned buffers.

How a file must be read is asked of the file itself (statx) and tried with one read at open. Where direct reads cannot be had, reads are
buffered, and that is said at once, kept in `mode`, and told in every summary.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import ConfigError
from .layout import aligned

DIRECT, BUFFERED = "direct", "buffered"
USUAL_ALIGNMENT = 4096   # tried where the kernel does not say
_HUGE = 2 << 20          # a huge page, of x86 and most others
RETRIES = 1              # a read that fails with EIO is tried once more
_STATX_DIOALIGN, _AT_EMPTY_PATH, _STATX_BYTES = 0x2000, 0x1000, 256
_MASK_AT, _MEMORY_AT, _OFFSET_AT = 0, 152, 156   # of struct statx (statx(2)): stx_mask, stx_dio_mem_align, stx_dio_offset_align


class EngineError(RuntimeError):
    """What an engine could not do while it ran; the message says what, where, and whether it can go on."""


class ReadError(EngineError):
    """A block that could not be read, or that is not what was exported."""


@dataclass(frozen=True)
class Alignment:
    """What direct reads of a file need, in bytes: of the memory they go to, and of the offset and length in the file."""

    memory: int
    offset: int


def alignment_of(descriptor: int) -> Alignment | None:
    """What the kernel says about direct reads of an open file (Linux 6.1 on); None where it does not say; offset 0 where it cannot be done."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except AttributeError:   # a C library before 2.28
        return None
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
        return None
    number = lambda at: int.from_bytes(found.raw[at : at + 4], "little")  # noqa: E731
    return Alignment(number(_MEMORY_AT), number(_OFFSET_AT)) if number(_MASK_AT) & _STATX_DIOALIGN else None


class Buffers:
    """`count` equal buffers of at least `size` bytes in one anonymous mapping, each aligned in memory; never more.

    `array(i)` is buffer i as uint8. They lie in huge pages where the system has them, else in pages taken in order: a direct read into pages that lie scattered in
    the machine's memory takes longer. Raises ConfigError where the memory cannot be had.
    """

    def __init__(self, count: int, size: int, alignment: int):
        self.stride = aligned(size, alignment)
        self.count, self.bytes = count, count * self.stride
        try:
            border = max(alignment, _HUGE) if self.bytes >= _HUGE else alignment
            self._mapping = mmap.mmap(-1, self.bytes + border, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)   # what lies before the border is never touched
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"no memory for {count} expert buffers of {self.stride} bytes ({self.bytes / 1e6:,.0f} MB): {error}; take a smaller cache") from None
        whole = np.frombuffer(self._mapping, np.uint8)
        first = -whole.ctypes.data % border
        if self.bytes >= _HUGE:
            with contextlib.suppress(OSError):   # a kernel without them
                self._mapping.madvise(mmap.MADV_HUGEPAGE, first, self.bytes // _HUGE * _HUGE)   # whole ones only: the last, in part ours, would take more than asked for
        whole[first : first + self.bytes : mmap.PAGESIZE] = 0
        self.whole = whole[first : first + self.bytes].reshape(count, self.stride)   # uint8 [count, stride]

    def array(self, index: int) -> np.ndarray:
        return self.whole[index]


@dataclass(frozen=True)
class _Access:
    """How the file is read at present."""

    descriptor: int
    mode: str
    alignment: Alignment


class BlockFile:
    """A file whose blocks are read whole. Thread-safe.

    `direct`: try to read past the page cache. `announce` is told, in one sentence, when that is not possible. `preadv`: the system call
    (file, [buffer], offset) -> bytes read; a test puts faults in its place. Counted: `reads`, `bytes` (as asked of the kernel), `retried`.
    """

    def __init__(self, path: str | Path, *, direct: bool = True, announce: Callable[[str], None] = print, preadv: Callable = os.preadv):
        self.path, self._announce, self._preadv = Path(path), announce, preadv
        self._lock = threading.Lock()
        self.counted = np.zeros(2, np.int64)   # reads, bytes; written by the kernel queue's compiled code, too
        self.retried = 0
        self.why = "asked for"   # the reason for the mode
        self._access = _Access(self._open(os.O_RDONLY), BUFFERED, Alignment(1, 1))
        self._open_files = [self._access.descriptor]
        self.size = os.fstat(self._access.descriptor).st_size
        if direct:
            self._go_direct()

    @property
    def reads(self) -> int:
        return int(self.counted[0])

    @property
    def bytes(self) -> int:
        return int(self.counted[1])

    @property
    def descriptor(self) -> int:
        """The open file as it is read at present."""
        return self._access.descriptor

    @property
    def plain(self) -> bool:
        """Whether reads are the system's own."""
        return self._preadv is os.preadv

    @property
    def mode(self) -> str:
        return self._access.mode

    @property
    def alignment(self) -> Alignment:
        return self._access.alignment

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{self.path}: {os.strerror(error.errno)}") from None

    def _go_direct(self) -> None:
        told = alignment_of(self._access.descriptor)
        if told is not None and not told.offset:
            return self._stay_buffered("the file system does not offer direct reads")
        wanted = Alignment(max(told.memory, 1), told.offset) if told else Alignment(USUAL_ALIGNMENT, USUAL_ALIGNMENT)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            return self._stay_buffered(f"opening for direct reads failed ({os.strerror(error.errno)})")
        self._open_files.append(descriptor)
        probe = Buffers(1, wanted.offset, max(wanted.memory, mmap.PAGESIZE)).array(0)
        try:
            got = self._preadv(descriptor, [probe[: wanted.offset]], 0)
            if got < min(wanted.offset, self.size):
                raise OSError(errno.EIO, f"{got} bytes of {min(wanted.offset, self.size)}")
        except OSError as error:
            return self._stay_buffered(f"an aligned read of {wanted.offset} bytes failed ({error.strerror})")
        self._access, self.why = _Access(descriptor, DIRECT, wanted), "as the kernel says" if told else "as tried"

    def _stay_buffered(self, why: str) -> None:
        self.why = why
        self._announce(f"{self.path.name}: reads are BUFFERED, through the page cache: {why}")

    def _fall_back(self) -> None:
        """From direct to buffered while running."""
        with self._lock:
            if self.mode == DIRECT:
                self._access = _Access(self._open_files[0], BUFFERED, Alignment(1, 1))
                self._stay_buffered("a direct read was refused (EINVAL) while running")

    def room(self, length: int, grain: int = 1) -> int:
        """Bytes that a buffer needs for a block of `length` bytes, where length and offset are multiples of `grain`."""
        step = self.alignment.offset
        return length if grain % step == 0 else aligned(length, step) + step

    def read(self, offset: int, length: int, buffer: np.ndarray) -> np.ndarray:
        """The bytes offset..offset+length-1, as a view of the uint8 array `buffer`, which has `room` for them.

        Short reads are gone on with. Raises ReadError, naming both counts or the system's word, for what cannot be read.
        """
        while True:
            access = self._access   # once: another thread may fall back meanwhile
            step = access.alignment.offset
            first = offset - offset % step
            last = min(aligned(offset + length, step), self.size)
            try:
                got = self._whole(access.descriptor, buffer[: aligned(last - first, step)], first, last - first, step)
            except OSError as error:
                if error.errno == errno.EINVAL and access.mode == DIRECT:
                    self._fall_back()
                    continue
                raise ReadError(f"{self.path.name}: reading {length} bytes at {offset} failed: {error.strerror}") from None
            found = max(min(first + got, offset + length) - offset, 0)
            if found < length:
                raise ReadError(f"{self.path.name}: {found} bytes of {length} at {offset}, then the file ends: it was cut short")
            with self._lock:
                self.counted += 1, got
            return buffer[offset - first : offset - first + length]

    def _whole(self, descriptor: int, buffer: np.ndarray, first: int, wanted: int, step: int) -> int:
        """Read until `wanted` bytes are there or the file ends; returns how many are."""
        done, tries = 0, 0
        while done < wanted:
            at = done - done % step   # a short read may end anywhere; the next one has to begin aligned
            try:
                got = self._preadv(descriptor, [buffer[at:]], first + at)
            except OSError as error:
                if error.errno != errno.EIO or tries == RETRIES:
                    raise
                tries += 1
                with self._lock:
                    self.retried += 1
                continue
            if at + got <= done:   # nothing new: the end of the file
                break
            done = at + got
        return min(done, wanted)

    def close(self) -> None:
        while self._open_files:
            os.close(self._open_files.pop())
