"""Direct reads through the kernel's own queue (Linux AIO: io_submit(2), io_getevents(2)), without threads: whoever computes also hands the reads
over and looks whether they have ended. A read costs the processor a few microseconds, where a thread that wakes, waits for the interpreter's
lock and hands over the buffer costs a hundred.
"""
# lanes: reads at a time

from __future__ import annotations

import ctypes
import errno
import os
import platform
from typing import NamedTuple

import numpy as np
from numba import float32, types

from .table import compiled

CONTEXT, FREE, UNPLACED, IDLE, ODD, SIZE, BATCHES = range(7)   # Io.at
WAITED, HANDED = range(2)                                      # Io.seconds
READS, BYTES = range(2)                                        # Io.counted
REFUSED = np.iinfo(np.int64).min                               # the result of a read that the kernel did not take
PREAD = 0                                                      # aio_lio_opcode
SPIN = 5e-4          # seconds for which the end of a read is asked for again and again: sleeping and waking take longer than many a read
STRIDE, NUMBERS = 1 << 12, 1 << 20   # float32 that are read between two looks at the clock; in all, beyond a core's own cache
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}.get(platform.machine(), (0, 0, 0, 0))
_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = _NUMBERS
_CLOCK = 1           # CLOCK_MONOTONIC
_syscall = types.ExternalFunction("syscall", types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64))
_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


class Io(NamedTuple):
    """The reads under way, and the buffers that are free."""

    request: np.ndarray    # int64 [lanes, 8]: struct iocb each
    pointer: np.ndarray    # int64 [lanes]: addresses of those that are handed over together
    event: np.ndarray      # int64 [lanes, 4]: struct io_event each
    key: np.ndarray        # int32 [lanes]: what a request reads
    buffer: np.ndarray     # int32 [lanes]: and where to
    idle: np.ndarray       # int32 [lanes]: requests that are not under way, the first at[IDLE] of it
    free: np.ndarray       # int32 [buffers]: the first at[FREE] of it
    unplaced: np.ndarray   # int32 [lanes]: keys that wait for a buffer, the first at[UNPLACED] of it
    address: np.ndarray    # int64 [buffers]
    offset: np.ndarray     # int64 per key: in the file
    check: np.ndarray      # bool per key: its bytes are to be checked when they are there
    odd: np.ndarray        # int64 [lanes, 3]: key, buffer, result of reads that are not simply there, the first at[ODD] of it
    counted: np.ndarray    # int64 [2]: reads and bytes
    moment: np.ndarray     # int64 [6]: three struct timespec: now, no time, the patience
    seconds: np.ndarray    # float64 [2]: in which reads were waited for, in which they were handed over
    at: np.ndarray         # int64, see above


def create(lanes: int, *, offsets: np.ndarray, check: np.ndarray, size: int, addresses: np.ndarray, counted: np.ndarray) -> Io:
    """Nothing is under way and every buffer is free. Without a context, until `open_context`."""
    whole = lambda *shape: np.zeros(shape, np.int64)  # noqa: E731
    short = lambda n: np.zeros(n, np.int32)  # noqa: E731
    io = Io(whole(lanes, 8), whole(lanes), whole(lanes, 4), short(lanes), short(lanes), np.arange(lanes, dtype=np.int32), np.arange(len(addresses), dtype=np.int32),
            short(lanes), addresses, offsets, check, whole(lanes, 3), counted, whole(6), np.zeros(2), whole(7))  # fmt: skip
    io.at[FREE], io.at[IDLE], io.at[SIZE] = len(addresses), lanes, size
    return io


def nothing() -> Io:
    """For an engine that reads by threads."""
    io = create(1, offsets=np.zeros(1, np.int64), check=np.zeros(1, np.bool_), size=1, addresses=np.zeros(4, np.int64), counted=np.zeros(2, np.int64))
    io.at[FREE] = 0
    return io


def open_context(io: Io, descriptor: int, patience: float) -> str:
    """Ask the kernel for a queue; the reason where there is none, else ''."""
    if not any(_NUMBERS):
        return f"not known for {platform.machine()}"
    libc, context = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
    if libc.syscall(_SETUP, len(io.request), ctypes.byref(context)):
        return os.strerror(ctypes.get_errno())
    io.at[CONTEXT] = context.value
    io.request[:, 2] = PREAD | descriptor << 32
    io.moment[4:] = int(patience), int(patience % 1 * 1e9)
    return ""


def close_context(io: Io) -> None:
    """Waits for the reads under way, or cancels them."""
    if io.at[CONTEXT]:
        ctypes.CDLL(None).syscall(_DESTROY, ctypes.c_ulong(int(io.at[CONTEXT])))
        io.at[CONTEXT] = 0


@compiled
def now(io):
    """Seconds."""
    _gettime(_CLOCK, io.moment.ctypes.data)
    return io.moment[0] + 1e-9 * io.moment[1]


@compiled
def place(io):
    """Hand over the reads that wait, as far as buffers are free, in one call."""
    n = 0
    while n < io.at[UNPLACED] and io.at[FREE] > 0:
        io.at[FREE] -= 1
        io.at[IDLE] -= 1
        lane, key, buffer = io.idle[io.at[IDLE]], io.unplaced[n], io.free[io.at[FREE]]
        io.key[lane], io.buffer[lane] = key, buffer
        request = io.request[lane]
        request[0], request[3], request[4], request[5] = lane, io.address[buffer], io.at[SIZE], io.offset[key]
        io.pointer[n] = request.ctypes.data
        n += 1
    if n == 0:
        return
    for i in range(io.at[UNPLACED] - n):
        io.unplaced[i] = io.unplaced[i + n]
    io.at[UNPLACED] -= n
    began = now(io)
    taken = max(_syscall(_SUBMIT, io.at[CONTEXT], n, io.pointer.ctypes.data, 0, 0), 0)
    io.seconds[HANDED] += now(io) - began
    io.at[BATCHES] += 1
    for i in range(taken, n):
        lane = (io.pointer[i] - io.request.ctypes.data) // 64
        odd(io, lane, REFUSED)


@compiled
def odd(io, lane, result):
    """A read that somebody has to look at."""
    row = io.odd[io.at[ODD]]
    row[0], row[1], row[2] = io.key[lane], io.buffer[lane], result
    io.at[ODD] += 1
    io.idle[io.at[IDLE]] = lane
    io.at[IDLE] += 1


@compiled
def ended(io, least, patient):
    """How many reads have ended, in io.event: at once, or (`patient`) as soon as `least` have; negative where a signal came."""
    limit = io.moment.ctypes.data + (32 if patient else 16)
    return _syscall(_GETEVENTS, io.at[CONTEXT], least, len(io.event), io.event.ctypes.data, limit)


@compiled
def whole(io, i):
    """The lane of the event `i`, if its read brought all that was asked for and nobody has to look at it; else -1, and it is among the odd."""
    lane, result = io.event[i, 0], io.event[i, 2]
    if result != io.at[SIZE]:
        odd(io, lane, result)
        return -1
    io.counted[READS] += 1
    io.counted[BYTES] += result
    if io.check[io.key[lane]]:
        odd(io, lane, result)
        return -1
    io.idle[io.at[IDLE]] = lane
    io.at[IDLE] += 1
    return lane


@compiled
def _timed(io, keys):
    """Seconds in which all `keys` are read, as many at a time as there are requests; negative where one was not read whole."""
    given = done = 0
    began = now(io)
    while done < len(keys):
        while given < len(keys) and io.at[IDLE] > 0 and io.at[FREE] > 0:
            io.unplaced[io.at[UNPLACED]] = keys[given]
            io.at[UNPLACED] += 1
            given += 1
            if io.at[UNPLACED] == io.at[IDLE] or io.at[UNPLACED] == io.at[FREE]:
                break
        place(io)
        got = ended(io, 0, False)
        for i in range(max(got, 0)):
            lane = whole(io, i)
            if lane < 0:
                return -1.0
            io.free[io.at[FREE]] = io.buffer[lane]
            io.at[FREE] += 1
            done += 1
        if io.at[ODD]:
            return -1.0
    return now(io) - began


@compiled
def _in_batches(io, keys, together, pause, numbers):
    """Seconds in which `keys` are read, `together` at once, the next ones `pause` seconds after the last of those has come; without the pauses, in which
    `numbers` are summed, as a model's weights would be: the system's code and data for a read leave the processor's caches. Negative where one was not read
    whole."""
    total, place_in, rest = 0.0, 0, float32(0)
    for first in range(0, len(keys), together):
        for i in range(together):
            io.unplaced[i] = keys[first + i]
        io.at[UNPLACED] = together
        began, done = now(io), 0
        place(io)
        while done < together:
            got = ended(io, 0, False)
            for i in range(max(got, 0)):
                lane = whole(io, i)
                if lane >= 0:
                    io.free[io.at[FREE]] = io.buffer[lane]
                    io.at[FREE] += 1
                    done += 1
            if io.at[ODD]:
                return -1.0
        at = now(io)
        total += at - began
        until = at + pause
        while now(io) < until:
            for i in range(place_in, place_in + STRIDE):
                rest += numbers[i]
            place_in = (place_in + STRIDE) % len(numbers)
    numbers[0] = rest
    return total


def timed(io: Io, keys: np.ndarray, together: int = 0, pause: float = 0.0) -> float:
    """Seconds to read blocks: one after another with as many under way as there are requests, or `together` at once. Raises OSError where a read failed."""
    keys = np.asarray(keys, np.int64)
    if together:
        found = _in_batches(io, keys[: len(keys) // together * together], together, pause, np.zeros(NUMBERS, np.float32))
    else:
        found = _timed(io, keys)
    if found < 0:
        raise OSError(errno.EIO, "a read of the measurement failed")
    return found


def addresses_of(arrays) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.int64)

