"""A system call with faults, in the place of os.preadv: what disks and file systems have been seen to do."""

import errno
import os
import threading


class Faulty:
    """`preadv` that passes reads on, but for those that a fault takes. Faults: (which read, what happens); `reads` counts the calls."""

    def __init__(self, *, short=None, errors=None, hang=None, flip=None, die=None):
        self.short = short            # every read gives at most so many bytes
        self.errors = errors or {}    # call number -> errno; "always" -> errno of every read after the probe
        self.hang = hang              # from this call on, reads do not come back until `release`
        self.flip = flip              # call number -> a bit of its first byte is flipped
        self.die = die                # call number -> the reading thread is told to exit
        self.reads, self.release, self._lock = 0, threading.Event(), threading.Lock()

    def __call__(self, descriptor, buffers, offset):
        with self._lock:
            self.reads += 1
            number = self.reads
        if self.hang is not None and number >= self.hang:
            self.release.wait(60)
        if self.die == number:
            raise SystemExit("the thread is told to exit")
        code = self.errors.get(number, self.errors.get("always") if number > 1 else None)
        if code:
            raise OSError(code, os.strerror(code))
        (buffer,) = buffers
        got = os.preadv(descriptor, [buffer[: self.short] if self.short else buffer], offset)
        if self.flip == number:
            buffer[0] ^= 1
        return got


EIO, EINVAL = errno.EIO, errno.EINVAL
