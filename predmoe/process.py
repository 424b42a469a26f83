"""What the kernel says of a process, and a limit on the memory that a process may be charged for (control groups, versions 1 and 2).

A group is charged for its processes' anonymous memory and for every page of the page cache that they were the first to touch, mapped or
not. It is not charged for a page that another group's process brought in earlier: shared libraries, as a rule, and files that are in the
cache already, which is why files that a limited process is to read are dropped from the cache first (`forget`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def kernel_bytes() -> int | None:
    """Bytes that the kernel has fetched from disks for this process (/proc/self/io, read_bytes): by direct reads, through the page cache
    and by page faults in mapped files alike. None where it does not say."""
    return _field("/proc/self/io", "read_bytes:", 1)


def peak_resident_bytes() -> int:
    """The process's peak resident memory (VmHWM): anonymous pages and pages of mapped files, among them those of a model that is mapped;
    not the page cache behind files that are read without being mapped."""
    return _field("/proc/self/status", "VmHWM:", 1024)


def major_faults() -> int:
    """Page faults of this process so far that waited for the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def reset_peak() -> None:
    """From here on VmHWM counts anew. Where that is forbidden, the peak has what went before in it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def give_back() -> None:
    """Free memory that the C library still holds goes back to the kernel; without effect where it is not glibc."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def forget(paths: Iterable[Path]) -> None:
    """Drop these files, and those in these folders, from the page cache; what was not yet on the disk is written first."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _field(path: str, name: str, unit: int) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * unit for line in lines if line.startswith(name)), None)


# --- control groups -------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class MemoryGroup:
    """A control group of its own for one process. Passes between processes as its folder."""

    folder: Path

    @property
    def _first(self) -> bool:
        """Whether it is version 1, whose files have other names."""
        return (self.folder / "memory.limit_in_bytes").exists()

    def command(self, command: list[str]) -> list[str]:
        """The command that joins the group before it becomes `command`: all that it ever allocates is charged to the group."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def limit(self, megabytes: float) -> bool:
        """Limit the group to so many MB (10^6 bytes) and count its peak anew. False where more is in use and cannot be reclaimed (version 2
        ends the process instead). Swap is not an escape."""
        os.sync()   # a page that waits to be written cannot be reclaimed
        limit = str(int(megabytes * 1e6))
        try:
            if self._first:
                (self.folder / "memory.swappiness").write_text("0")
                (self.folder / "memory.limit_in_bytes").write_text(limit)
            else:
                with contextlib.suppress(FileNotFoundError):   # a kernel without swap
                    (self.folder / "memory.swap.max").write_text("0")
                (self.folder / "memory.max").write_text(limit)
        except OSError:
            return False
        return True

    def peak(self) -> Callable[[], int | None]:
        """Counts from now on: what it returns says the most that the group was charged for since, page cache included (None where the
        kernel does not count it; since the group's start in version 2 before Linux 6.12)."""
        path = self.folder / ("memory.max_usage_in_bytes" if self._first else "memory.peak")
        if not path.exists():
            return lambda: None
        file = os.open(path, os.O_RDWR)   # kept: version 2 counts anew for the descriptor that asked for it
        with contextlib.suppress(OSError):
            os.write(file, b"0")
        return lambda: int(os.pread(file, 32, 0))


@contextlib.contextmanager
def memory_group(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[MemoryGroup | None]:
    """A new memory group below this process's own (or beside it, where version 2 allows none below), removed at the end; None where it
    cannot be had: no control groups, none with memory, or no right to make one."""
    folder = next((made for made in map(_made, _places(root, own)) if made), None)
    try:
        yield MemoryGroup(folder) if folder else None
    finally:
        if folder:
            _removed(folder)


def _places(root: Path, own: Path) -> list[Path]:
    """Folders in which a group might be made, the best first."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    first = [path for _, controllers, path in lines if "memory" in controllers.split(",")]
    if first:   # in a container the path may be the host's, and the mounted root the container's own group
        return [root / "memory" / first[0].lstrip("/"), root / "memory"]
    second = [path for number, controllers, path in lines if number == "0" and not controllers]
    return [place for path in second for place in (root / path.lstrip("/"), (root / path.lstrip("/")).parent) if place.is_relative_to(root)]


def _removed(folder: Path, patience: float = 5.0) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            return folder.rmdir()
        except OSError:   # a process that has ended may be in it for a moment longer
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _made(place: Path) -> Path | None:
    try:
        folder = Path(tempfile.mkdtemp(prefix="predmoe-", dir=place))
    except OSError:
        return None
    if any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        return folder
    folder.rmdir()
    return None
