"""The experts in memory: a fixed number of buffers, reads into them, and the simulator's bookkeeping between the two.

Direct reads go through the kernel's own queue (`kernelqueue`): the decoder hands them over and takes note of those that have ended. Where that cannot
be had (reads through the page cache, which it would wait for; a system without it), threads read, and `reads_by` says why.

A top-k set is one event, as in the simulator: what is resident is used, the rest is demanded, room is made. A set that is larger than
the cache is read, computed and dropped expert by expert. Every read takes a buffer of its own until its place is decided, so the buffers
are as many as the cache has slots, and one per read at a time.
"""
# L layers, E experts, N tokens of a pass, K chosen

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import numpy as np

from ..config import ConfigError
from ..simulator import Cache, Ledger, Prefetch, SimulationError
from ..simulator import diskqueue as dq
from ..simulator import events
from . import control as ctl
from . import kernelqueue
from .layout import Manifest
from .storage import DIRECT, BlockFile, Buffers, EngineError, ReadError

MOST_LANES = 1024                       # reads at a time: as many as a disk's own queue takes
SIGNALS = 1000                          # in a row without a read between them
VERIFY = ("first", "always", "never")   # when a block's checksum is computed


def slots_of(cache: Cache, manifest: Manifest) -> int:
    """Experts that `cache` can hold at most of this model."""
    L, E = manifest.model.num_layers, manifest.model.num_experts
    groups, per_group = (L, E) if cache.scope == "layer" else (1, L * E)
    capacity = cache.slots if cache.slots is not None else cache.bytes // manifest.block.size
    return groups * min(capacity, per_group)


class ExpertCache:
    """See the module. One thread, the decoder's, calls `ask`, `foretell` and `members`; reads go on beside it.

    `lanes`: reads at a time. `routing`: what has been chosen, filled by the decoder, or a whole trace for oracle and Belady. `usage`: uses
    per key by which pinned and static experts are chosen. `patience`: seconds without an answer after which a read counts as hung.
    Raises ConfigError for a cache or a memory that cannot be had.
    """

    def __init__(self, file: BlockFile, manifest: Manifest, cache: Cache, prefetch: Prefetch | None, *, lanes: int, routing: events.Routing, oracle: bool,
                 guesses: int, usage: np.ndarray, verify: str = "first", patience: float = 30.0, warmup: int = 0):  # fmt: skip
        if verify not in VERIFY:
            raise ConfigError(f"verify={verify!r} is unknown; choose one of {', '.join(VERIFY)}")
        if not 1 <= lanes <= MOST_LANES:
            raise ConfigError(f"lanes={lanes} must lie in 1..{MOST_LANES}: reads at a time")
        model = manifest.model
        size = np.full(model.num_layers, manifest.block.size, np.int64)
        try:
            self.control = ctl.Control(cache, prefetch, routing, guesses, num_experts=model.num_experts, expert_bytes=size, top_k=model.top_k, lanes=lanes, usage=usage, oracle=oracle, warmup=warmup)
        except SimulationError as error:
            raise ConfigError(str(error)) from None
        self._file, self._size, self._patience, self._num_experts = file, manifest.block.size, patience, model.num_experts
        self._offset = [offset for row in manifest.offsets for offset in row]
        self._crc = [value for row in manifest.crc32 for value in row]
        self._check = np.full(len(self._crc), verify != "never")
        self._check_again = verify == "always"
        self.buffers = Buffers(slots_of(cache, manifest) + lanes, file.room(self._size, manifest.alignment), max(4096, file.alignment.memory))
        self._free = list(range(self.buffers.count))   # of the threads' reads; the kernel queue has its own list
        self._unplaced: deque[int] = deque()   # started reads that wait for a buffer
        self._flight: dict[int, int] = {}
        self._lock = threading.Lock()
        self._jobs: SimpleQueue = SimpleQueue()
        self._arrived: SimpleQueue = SimpleQueue()
        self._set = 0                          # number of the current set: what arrives for one that was given up is ignored
        self._unfinished = False               # not all of the current set has been handed over
        self._stalled = 0.0
        self._counted = np.zeros(9, np.int64)
        self.preloaded_bytes = 0
        self._preload()
        why = self._open_queue(lanes, manifest)
        self.queued = not why   # whether reads go through the kernel's queue
        self._threads_why, self._signals = why, (0, 0)
        self._threads = [] if self.queued else [threading.Thread(target=self._work, name=f"reader {i}", daemon=True) for i in range(lanes)]
        for thread in self._threads:
            thread.start()

    def _open_queue(self, lanes: int, manifest: Manifest) -> str:
        """Ask for the kernel's queue; why there is none, or ''."""
        if self._file.mode != DIRECT:
            return "reads are not direct"
        if not self._file.plain:
            return "reads are not the system's own"
        if manifest.alignment % self._file.alignment.offset:
            return f"blocks are aligned to {manifest.alignment} bytes, this file's reads to {self._file.alignment.offset}"
        io = kernelqueue.create(lanes, offsets=np.array(self._offset, np.int64), check=self._check, size=self._size, counted=self._file.counted,
                                addresses=kernelqueue.addresses_of(self.buffers.whole))  # fmt: skip
        io.free[: len(self._free)], io.at[kernelqueue.FREE] = self._free, len(self._free)
        if why := kernelqueue.open_context(io, self._file.descriptor, self._patience):
            return f"the kernel gives no queue: {why}"
        self.control.take(io=io)
        return ""

    @property
    def reads_by(self) -> str:
        """Who reads, in words."""
        if not self.queued:
            return f"threads ({self._threads_why})"
        return "kernel queue" if self._file.mode == DIRECT else "the decoder, one at a time (the kernel queue's direct reads were refused while running)"

    @property
    def stalled(self) -> float:
        """Seconds in which the decoder waited for the disk."""
        return self._stalled + float(self.control.io.seconds[kernelqueue.WAITED])

    # --- the decoder's side -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A set, or in `loop` those of a whole token, will be asked for and handed over; `finished` ends it."""
        if self._unfinished:   # a set was given up: what its reads bring counts as resident, so they have to be over
            self.quiet()
        self._unfinished = True

    def finished(self) -> None:
        self._unfinished = False

    def ask(self, s: int, layer: int) -> None:
        """The router of `layer` has chosen in pass `s` (`control.routing` has it): demand what is missing and make room."""
        self.begin()
        with self._lock:
            self.control.asked(s, layer)
            own = self.control.own
            self._members = own.members[: own.out[ctl.COUNT]].tolist()
            self._waiting, self._outside = int(own.out[ctl.WAITING]), int(own.out[ctl.OUTSIDE])
            self._set += 1
            self._settle()

    def foretell(self, s: int, layer: int) -> None:
        """Queue the guesses that were written to `control` for this layer, or the oracle's."""
        with self._lock:
            self.control.foretold(s, layer)
            self._begin_reads()

    def members(self) -> Iterator[tuple[int, int]]:
        """(key, buffer) of each expert of the current set, those in memory first, then as they arrive. A buffer may be used until the
        next one is taken. Raises ReadError where one cannot be had: the set is given up, the cache is as it was without it."""
        if self.queued:
            yield from self._queued_members()
            return
        holder = self.control.own.holder
        with self._lock:   # a demand may have arrived already; it is also announced
            ready = [(key, int(holder[key])) for key in self._members if holder[key] >= 0]
        taken = {key for key, _ in ready}
        for key, buffer in ready:
            yield key, buffer
            self._used(key)
        for _ in range(self._waiting):
            key, buffer, fault = self._next()
            if fault is not None:
                self._abandon()
                raise fault
            if key not in taken:
                taken.add(key)
                yield key, buffer
                self._used(key)
        if len(taken) != len(self._members):
            raise EngineError(f"{len(taken)} experts of {len(self._members)} were handed over: the cache's bookkeeping is wrong")
        self.finished()

    def _queued_members(self) -> Iterator[tuple[int, int]]:
        holder, left = self.control.own.holder, list(self._members)
        while left:
            ready = [key for key in left if holder[key] >= 0]
            if not ready:
                self.see_to(self.control.waited())
            for key in ready:
                yield key, int(holder[key])
                self.control.used(key)
                self.see_to(self.control.arrived())
            left = [key for key in left if key not in ready]
        self.finished()

    def see_to(self, code: int) -> None:
        """What the kernel queue's compiled code came back for. Raises ReadError where an expert of the current set cannot be had."""
        if code == ctl.LOOK:
            fault = self._look()
            if fault is not None:
                raise fault
        elif code == ctl.LATE:
            self._late()
        elif code == ctl.SIGNAL:
            self._signalled()

    def _signalled(self) -> None:
        """A signal came, whose handler runs when this returns; or the queue is none any more (of a process that was forked, say), which comes back without end."""
        reads, times = self._file.reads, self._signals[1]
        self._signals = (reads, times + 1) if reads == self._signals[0] else (reads, 1)
        if self._signals[1] > SIGNALS:
            self._signals = (reads, 0)
            raise EngineError("the kernel's queue of reads no longer answers: open the engine again, in the process that generates")

    def _look(self) -> Exception | None:
        """Check the blocks that are to be checked, read again what was not read whole; returns the fault of one that is awaited."""
        io, told = self.control.io, None
        rows = io.odd[: io.at[kernelqueue.ODD]].tolist()
        io.at[kernelqueue.ODD] = 0
        for key, buffer, result in rows:
            try:
                if result == self._size:
                    self._verify(key, self.buffers.array(buffer))
                else:
                    self._read(key, buffer)
                fault = None
            except BaseException as error:   # among them a keyboard's interrupt: the books are kept first
                fault = error if isinstance(error, EngineError) or not isinstance(error, Exception) else ReadError(f"reading {self._named(key)} failed: {type(error).__name__}: {error}")
            if fault is None:
                self.control.ended(key, buffer)
            else:
                awaited = self.control.failed(key)
                self.control.give(buffer)
                if awaited or not isinstance(fault, Exception):
                    told = told or fault
        self.control.placed()
        return told

    def empty(self) -> None:
        """Forget all but the pinned experts, and the queued guesses."""
        with self._lock:
            self.control.emptied()
            self._settle()

    def counts(self) -> np.ndarray:
        """int64 [9]: the columns of `diskqueue.ACCESSES` and following, over all passes so far."""
        with self._lock:
            return self._counted + self.control.q.per_pass.sum(0)

    def rebase(self, passes: int, tokens: int) -> None:
        """Begin to number passes from 0 again, with room for one of `tokens` tokens; what was counted is kept."""
        with self._lock:
            self._counted += self.control.q.per_pass.sum(0)
            self.control.rebase(passes, tokens)

    def ledger(self) -> Ledger:
        with self._lock:
            return self.control.ledger()

    def quiet(self) -> None:
        """Wait until no read is queued or under way. A set that has not been handed over whole is given up: reads may wait for its buffers."""
        if self._unfinished:
            self._abandon()
        began = time.monotonic()
        at = self.control.q.at
        while self.queued and at[dq.ACTIVE]:
            code = self.control.waited()
            if code == ctl.LOOK:
                self._look()   # of sets that were given up, or guesses: nobody waits
            elif code == ctl.SIGNAL:
                self._signalled()
            elif code == ctl.LATE:
                raise EngineError(f"the disk gave no answer for {self._patience:g} s")
        while at[dq.ACTIVE]:
            if time.monotonic() - began > self._patience:
                raise EngineError(f"the disk gave no answer for {self._patience:g} s")
            time.sleep(2e-4)
        self.finished()

    def leaked(self) -> int:
        """Buffers that are neither free, nor hold a resident expert, nor are being read into; 0 between passes unless something is wrong."""
        with self._lock:
            held = int((self.control.own.holder >= 0).sum())
            if self.queued:
                io = self.control.io
                return self.buffers.count - held - int(io.at[kernelqueue.FREE] + len(io.idle) - io.at[kernelqueue.IDLE] + io.at[kernelqueue.ODD])
            return self.buffers.count - len(self._free) - held - len(self._flight)

    def close(self) -> bool:
        """End the threads, or the kernel's queue; returns whether all have ended: a thread's read that hangs is left to the process's end."""
        kernelqueue.close_context(self.control.io)
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + 0.5   # for all of them
        for thread in self._threads:
            thread.join(timeout=max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _next(self) -> tuple[int, int, Exception | None]:
        began = time.perf_counter()
        while True:
            try:
                number, *arrival = self._arrived.get(timeout=self._patience)
            except Empty:
                self._late()
            if number == self._set:
                self._stalled += time.perf_counter() - began
                return tuple(arrival)

    def _late(self) -> None:
        own = self.control.own
        missing = [key for key in own.members[: own.out[ctl.COUNT]].tolist() if own.holder[key] < 0]
        self._abandon()
        raise EngineError(f"the disk gave no answer for {self._patience:g} s; {self._named(missing[0]) if missing else 'a read'} is still awaited") from None

    def _used(self, key: int) -> None:
        """A member has been computed: where it has no place in the cache, its buffer is free."""
        if not self._outside or self.control.r.after[key] >= 0:
            return
        with self._lock:
            holder = self.control.own.holder
            self._free.append(int(holder[key]))
            holder[key] = -1
            self._place()

    def _abandon(self) -> None:
        with self._lock:
            self._set += 1
            self.control.abandoned()
            self._settle()

    # --- both sides, under the lock -----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After a step of the bookkeeping: buffers come back, reads begin."""
        if not self.queued:
            self._free += self.control.freed()
        self._begin_reads()

    def _begin_reads(self) -> None:
        if self.queued:
            self.control.placed()
        else:
            self._unplaced.extend(self.control.started())
            self._place()

    def _place(self) -> None:
        while self._unplaced and self._free:
            key, buffer = self._unplaced.popleft(), self._free.pop()
            self._flight[key] = buffer
            self._jobs.put((key, buffer))

    # --- the readers' side --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, buffer = job
            try:
                self._read(key, buffer)
                fault = None
            except BaseException as error:   # whatever it is, the decoder has to hear of it, and the thread has to live
                fault = error if isinstance(error, EngineError) else ReadError(f"reading {self._named(key)} failed: {type(error).__name__}: {error}")
            with self._lock:
                del self._flight[key]
                if fault is None:
                    awaited = self.control.ended(key, buffer)
                else:
                    awaited = self.control.failed(key)
                    self._free.append(buffer)
                if awaited:
                    self._arrived.put((self._set, key, buffer, fault))
                self._settle()

    def _read(self, key: int, buffer: int) -> None:
        array = self.buffers.array(buffer)
        try:
            found = self._file.read(self._offset[key], self._size, array)
        except ReadError as error:
            raise ReadError(f"{self._named(key)}: {error}") from None
        if found.ctypes.data != array.ctypes.data:   # the file wants a coarser alignment than the block has
            array[: self._size] = found
        self._verify(key, array)

    def _verify(self, key: int, array: np.ndarray) -> None:
        if self._check[key]:
            if zlib.crc32(array[: self._size]) != self._crc[key]:
                raise ReadError(f"{self._named(key)}: its bytes are not those that were exported (checksum); export the checkpoint again")
            self._check[key] = self._check_again

    def _named(self, key: int) -> str:
        layer, expert = divmod(key, self._num_experts)
        return f"expert {expert} of layer {layer}"

    def _preload(self) -> None:
        """Read the experts that are resident from the start (pinned, static)."""
        for key in np.flatnonzero(self.control.r.after[: len(self._offset)] >= 0).tolist():
            buffer = self._free.pop()
            self._read(key, buffer)
            self.control.own.holder[key] = buffer
            self.preloaded_bytes += self._size
