"""Checkpoints in parts: every process writes what it holds, and any number of processes, one included, goes on from them.

In a run's folder: state.json (which folder, which step), replaced as a whole, and state-STEP/ as torch.distributed.checkpoint
writes it. Tensors go by name, so that it does not matter who held which part when they were written.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from predmoe.config import ConfigError
from predmoe.files import read_json, reason, write_json

POINTER = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


def saved(folder: Path) -> dict | None:
    """What state.json says: the folder's name, step, seconds and the log's bytes. None where there is none."""
    source = Path(folder) / POINTER
    if not source.exists():
        return None
    found = read_json(source, {"folder": str, "step": int, "seconds": (int, float), "log_bytes": int}, remedy="remove it to train the run from its start")
    if not (source.parent / found["folder"]).is_dir():
        raise ConfigError(f"{source} names the checkpoint {found['folder']}, which is not there; restore that folder, or remove {source} to train the run from its start")
    return found


def names(trainer) -> dict[str, torch.nn.Parameter]:
    """Every trained parameter by name; those of the heads begin with "predictor."."""
    parts = {"model": trainer.model} | ({"predictor": trainer.predictor} if trainer.predictor is not None else {})
    return {f"{part}.{name}": parameter for part, module in parts.items() for name, parameter in module.named_parameters()}


def flat(trainer) -> dict[str, Tensor]:
    """Weights, AdamW's moments and the token table as one mapping of tensors that share the trainer's memory."""
    out = {}
    for name, parameter in names(trainer).items():
        state = trainer.optimizer.state[parameter]
        if not state:   # as AdamW makes it in its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        out[name] = parameter.detach()
        out |= {f"optimizer.{name}.{key}": state[key] for key in ("step", *MOMENTS)}
    if trainer.table is not None:
        out["table"] = trainer.table.counts_LVE
    return out


def save(trainer, *, leader: bool) -> None:
    """Write the state of all processes; to be called by each of them. The last good checkpoint stays until this one is whole.

    Raises RuntimeError where a process cannot write its part.
    """
    import torch.distributed.checkpoint as dcp

    folder, log = trainer.folder, trainer.folder / "metrics.jsonl"
    name = f"state-{trainer.step:08d}"
    try:
        dcp.save(flat(trainer), storage_writer=_writer(folder / name), no_dist=not torch.distributed.is_initialized())
    except dcp.api.CheckpointException as error:   # no ordinary Exception: it holds those of every process, all of which have ended their part
        if leader:
            shutil.rmtree(folder / name, ignore_errors=True)   # a full disk needs the room
        raise RuntimeError((str(error).strip().splitlines() or [type(error).__name__])[-1][:200]) from error
    if leader:
        with open(log, "rb") as file:   # on the disk before a checkpoint that counts on its bytes
            os.fsync(file.fileno())
        try:
            write_json(folder / POINTER, {"folder": name, "step": trainer.step, "seconds": trainer.seconds, "log_bytes": log.stat().st_size})
        except OSError:
            shutil.rmtree(folder / name, ignore_errors=True)   # likewise
            raise
        (folder / "state.pt").unlink(missing_ok=True)
        _remove_folders(folder, but=name)


def load(trainer, sharded: dict) -> None:
    """Bring the trainer to a checkpoint's state, whoever wrote it. Raises TrainingError where it is damaged or of another run."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    source = trainer.folder / sharded["folder"]
    try:
        reader = _reader(source)
        reader.read_metadata()   # dcp itself would show two tracebacks before it says that there is none
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")   # one process is meant
            dcp.load(flat(trainer), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    except (CheckpointException, pickle.UnpicklingError, OSError, RuntimeError, LookupError, ValueError, EOFError, AttributeError, ImportError, TypeError) as error:
        from predmoe.train import TrainingError

        why = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
        raise TrainingError(f"cannot resume from {source}: it is damaged or of another run ({why}); restore it from a copy, or remove {trainer.folder / POINTER} "
                            "to train the run from its start") from error  # fmt: skip


def _writer(folder: Path):
    """Writes this process's part; of a write that failed it tells what the system said, which torch hides behind positions in a file."""
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        def write_data(self, plan, planner):
            try:
                return super().write_data(plan, planner)
            except (OSError, RuntimeError) as error:
                raise reason(error)

    return Writer(folder)


def _reader(folder: Path):
    """Reads what this process needs, and its checksums first: torch itself loads flipped bits, and files that are cut off, without a word."""
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_data(self, plan, planner):
            for index in {item.storage_index for item in plan.items}:
                found = self.storage_data[index]
                _check_slice(folder / found.relative_path, found.offset, found.length)
            return super().read_data(plan, planner)

    return Reader(folder)


def _check_slice(path: Path, offset: int, length: int) -> None:
    """Raise ValueError unless these bytes of a part are a tensor as it was written (an archive of torch.save)."""
    from predmoe.train import check_archive

    with open(path, "rb") as file:
        file.seek(offset)
        raw = file.read(length)
    try:
        if len(raw) < length:
            raise zipfile.BadZipFile("it is cut off")
        check_archive(io.BytesIO(raw))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path.name}: {error}") from None


def spread(trainer, whole: dict) -> None:
    """Give the parts of a trainer what an undivided checkpoint (state.pt, as torch.load returns it) holds."""
    held = {f"model.{name}": value for name, value in whole["model"].items()} | {f"predictor.{name}": value for name, value in (whole["predictor"] or {}).items()}
    place = {id(p): i for i, p in enumerate(p for group in trainer.optimizer.param_groups for p in group["params"])}
    for name, parameter in names(trainer).items():
        held |= {f"optimizer.{name}.{key}": value for key, value in whole["optimizer"]["state"][place[id(parameter)]].items()}
    held["table"] = whole.get("table")
    for name, target in flat(trainer).items():
        value = held[name].to(target.device)
        if hasattr(target, "placements"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def whole_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """The module's state on the host, undivided; to be called by every process."""
    return {name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu() for name, value in module.state_dict().items()}


def remove(folder: Path) -> None:
    """Take away a checkpoint in parts, where there is one."""
    if (source := Path(folder) / POINTER).exists():
        source.unlink()
        _remove_folders(Path(folder), but="")


def _remove_folders(folder: Path, *, but: str) -> None:
    for old in folder.glob("state-*"):
        if old.name != but:
            shutil.rmtree(old, ignore_errors=True)
