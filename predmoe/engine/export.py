"""Export a checkpoint for the engine, streaming: one expert is in memory at a time, beside the resident part.

Any OLMoE-format folder will do, ours or another's. The export appears whole or not at all: it is written into a folder beside
`out` and renamed at the end; the disk's free space is asked before the first byte. What an export to the same `out` left that was killed is removed by the next one.
"""
# D model width, F expert width

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..config import PREDICTORS, TOKENIZERS, ConfigError, ModelConfig
from ..files import parse_json
from ..checkpoint import COPY_AGAIN, check_entries, check_floating, dense_entries, dense_shapes, expert_entries, find_checkpoint, headers
from ..model import MoEModel, count_parameters
from .layout import ALIGNMENT, DTYPES, EXPERTS, HEADS, RESIDENT, TOKENIZER, Block, Manifest, crc32_of, head_shapes, other_files

ROOM = 1 << 20             # bytes for manifest and file system beside what is counted
LONGEST_CONTEXT = 1 << 24   # tokens: no weight's shape says it, and an engine has tables of its length
ELSEWHERE = "nothing is left of it: mend that, or export to another folder"
PARTIAL = ".unfinished"     # what the name of a folder that is being written ends with


class Source(Protocol):
    """Where an export's tensors come from: OLMoE's names and shapes, one tensor at a time."""

    config: ModelConfig

    def names(self) -> Iterable[str]: ...

    def get(self, name: str) -> Tensor: ...


class Checkpoint:
    """An OLMoE-format folder, opened but not read. Raises ConfigError where config.json does not say what the files hold."""

    def __init__(self, folder: str | Path):
        self.config, files = find_checkpoint(folder)
        self._place: dict[str, Path] = {}
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for file in files:
            held = headers(file)
            self._place |= dict.fromkeys(held, file)
            found |= held
        shapes = {name: shape for name, (shape, _) in found.items()}
        try:
            check_entries(shapes, self.config, shapes)
            check_floating({name: dtype for name, (_, dtype) in found.items()})
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None

    def names(self) -> Iterable[str]:
        return self._place

    def get(self, name: str) -> Tensor:
        # Opened for each tensor: a file that stays mapped would count every page ever touched as this process's memory.
        try:
            with safe_open(self._place[name], "pt") as opened:
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self._place[name]} cannot be read any more: {error}; {COPY_AGAIN}") from None


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weights and their float32 scales, one per output row: the row's largest magnitude becomes 127."""
    matrix = matrix.float()
    scale = (matrix.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (matrix / scale.unsqueeze(1)).round().to(torch.int8), scale


def as_stored(matrix: Tensor, dtype: str) -> Tensor:
    """The matrix that the engine computes with, in float32, after it has been stored as `dtype`."""
    if dtype == "int8":
        weights, scale = quantise(matrix)
        return weights.float() * scale.unsqueeze(1)
    return matrix.to(DTYPES[dtype]).float()


@torch.no_grad()
def stored_model(model: MoEModel, dtype: str) -> MoEModel:
    """`model` changed in place to what an export as `dtype` holds, for its loss to be measured: experts rounded, and with
    bf16 the resident part, too."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            for matrix in parameter:
                matrix.copy_(as_stored(matrix, dtype))
        elif dtype == "bf16":
            parameter.copy_(as_stored(parameter, dtype))
    return model


def export(source: str | Path | Source, out: str | Path, *, dtype: str = "bf16", heads: Mapping[str, str | Path] | None = None, tokenizer: str | None = None,
           name: str | None = None, alignment: int = ALIGNMENT, progress: Callable[[str], None] = lambda line: None) -> Manifest:  # fmt: skip
    """Write the model in `source` (an OLMoE-format folder, or a Source) to the new folder `out`; returns its manifest.

    `dtype`: of the experts; the resident part is kept as it is, or in bf16 with "bf16". `heads`: predictor ("linear",
    "ranking") -> a safetensors file of its weights; by default those that lie beside the checkpoint of one of our runs. `tokenizer`: its
    name for `tokenizer.load_tokenizer`; by default the run's, or the folder's own tokenizer.json. Raises ConfigError for what
    cannot be exported, and where the disk has not enough room; nothing is left behind then.
    """
    out = Path(out)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    folder = Path(source) if isinstance(source, (str, Path)) else None
    source = Checkpoint(folder) if folder else source
    config = source.config
    check_entries(source.names(), config)
    if config.context > LONGEST_CONTEXT:
        raise ConfigError(f"the model's context of {config.context} tokens (max_position_embeddings) is beyond {LONGEST_CONTEXT}: set in config.json what the model was trained for")
    fitted = {kind: read_heads(kind, Path(path), config) for kind, path in (_own_heads(folder) if heads is None and folder else heads or {}).items()}
    tokenizer = _tokenizer(tokenizer, folder, progress)
    with _partial(out, config, dtype, alignment, fitted, progress) as temporary:
        progress("resident part")
        save_file(_resident(source, dtype), temporary / RESIDENT)
        offsets, sums = _write_experts(source, temporary / EXPERTS, dtype, alignment, progress)
        if fitted:
            save_file({f"{kind}/{key}": tensor for kind, (state, _) in fitted.items() for key, tensor in state.items()}, temporary / HEADS)
        if folder and tokenizer == TOKENIZER:
            shutil.copyfile(folder / TOKENIZER, temporary / TOKENIZER)
        manifest = Manifest(name=name or (folder.resolve().name if folder else "model"), dtype=dtype, alignment=alignment, model=config, offsets=offsets, crc32=sums,
                            files={file: crc32_of(temporary / file) for file in other_files(fitted, tokenizer)},
                            heads={kind: horizons for kind, (_, horizons) in fitted.items()}, tokenizer=tokenizer)  # fmt: skip
        manifest.save(temporary)
        for path in temporary.iterdir():
            path.chmod(0o644)   # the library leaves its files to their owner alone
        temporary.chmod(0o755)
        try:
            os.rename(temporary, out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ConfigError(f"{out} has come to be there meanwhile, of another export perhaps: this one is removed; use that one, or export to another folder") from None
    return manifest


def _tokenizer(asked: str | None, folder: Path | None, progress: Callable[[str], None]) -> str | None:
    """The tokenizer as the manifest names it: the one that was `asked` for, or the model's own. Raises ConfigError where there is no such."""
    if asked is None:
        own = own_tokenizer(folder) if folder else None
        if own in (None, TOKENIZER, *TOKENIZERS):
            return own
        progress(f"without a tokenizer: the run's own, {own}, is none of {', '.join(TOKENIZERS)}; prompts are given as token ids")
        return None
    if asked == TOKENIZER and folder and not (folder / TOKENIZER).is_file():
        raise ConfigError(f"{folder / TOKENIZER}: no such file; choose one of {', '.join(TOKENIZERS)}, or put it there")
    if asked not in TOKENIZERS and not (asked == TOKENIZER and folder):
        raise ConfigError(f"tokenizer={asked!r} is unknown; choose one of {', '.join(TOKENIZERS)}, or {TOKENIZER}, the checkpoint's own")
    return asked


def needed_bytes(config: ModelConfig, dtype: str, alignment: int = ALIGNMENT) -> int:
    """Disk space of an export without its heads, the resident part counted in float32 where it may be that."""
    experts = config.num_layers * config.num_experts
    dense = count_parameters(config)["total"] - experts * 3 * config.hidden_size * config.expert_size
    return experts * Block.of(config, dtype, alignment).size + dense * (2 if dtype == "bf16" else 4) + ROOM


@contextlib.contextmanager
def _partial(out: Path, config: ModelConfig, dtype: str, alignment: int, fitted: Mapping, progress: Callable[[str], None]) -> Iterator[Path]:
    """The folder to write into, beside `out`, once all is known that could forbid the export; removed at the end unless it was renamed. What goes wrong within is a ConfigError."""
    if os.path.lexists(out):   # a link that leads nowhere as well: nothing can be renamed onto it
        raise ConfigError(f"{out} is there already: remove it, or export to another folder")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such folder to write {out.name} in")
    _remove_abandoned(out, progress)
    needed = needed_bytes(config, dtype, alignment) + sum(t.nbytes for state, _ in fitted.values() for t in state.values())
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ConfigError(f"the export needs {needed / 1e6:,.1f} MB, and {out.parent} has {free / 1e6:,.1f} MB free: free some there, or export to another disk")
    temporary = lock = None
    try:
        while lock is None:   # until no other export has taken it for abandoned before it was locked
            temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=PARTIAL, dir=out.parent))
            try:
                lock = _locked(temporary)
            except OSError:   # a file system without locks: there nobody takes a folder for abandoned
                break
        yield temporary
    except SafetensorError as error:   # the library's word for a system error
        raise ConfigError(f"{out} cannot be written: {error}; {ELSEWHERE}") from None
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {os.strerror(error.errno)}; {ELSEWHERE}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, which the kernel gives back however its holder ends; None where it is another's or the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _remove_abandoned(out: Path, progress: Callable[[str], None]) -> None:
    """Remove the folders of earlier exports to `out` that nobody writes any more: those that were killed."""
    ours = re.compile(re.escape(f".{out.name}.") + r"[a-z0-9_]{8}" + re.escape(PARTIAL))
    for folder in sorted(path for path in out.parent.iterdir() if ours.fullmatch(path.name) and path.is_dir() and not path.is_symlink()):
        with contextlib.suppress(OSError):   # another user's: it stays
            if (lock := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                progress(f"removed {folder}, left by an export that was killed" if not folder.exists() else f"{folder}, left by an export that was killed, cannot be removed")


def _checked(source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = source.get(name)
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{name} is {tuple(tensor.shape)}, config.json says {shape}")
    if not tensor.is_floating_point():
        raise ConfigError(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}; only float checkpoints can be exported")
    return tensor


def _resident(source: Source, dtype: str) -> dict[str, Tensor]:
    config = source.config
    shapes, found = dense_shapes(config), {}
    for ours, entries in dense_entries(config).items():
        rows = shapes[ours][0] // len(entries)
        parts = [_checked(source, name, (rows, *shapes[ours][1:])) for name in entries]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        found[ours] = tensor.to(torch.bfloat16 if dtype == "bf16" else tensor.dtype).contiguous()
    return found


def _write_experts(source: Source, path: Path, dtype: str, alignment: int, progress) -> tuple[tuple, tuple]:
    """Write every block; returns their offsets and checksums, [L][E] each."""
    config = source.config
    block = Block.of(config, dtype, alignment)
    D, F = config.hidden_size, config.expert_size
    offsets, sums, at = [], [], 0
    with open(path, "wb") as file:
        for layer in range(config.num_layers):
            progress(f"experts of layer {layer + 1} of {config.num_layers}")
            offsets.append(tuple(range(at, at + config.num_experts * block.size, block.size)))
            sums.append([])
            for expert in range(config.num_experts):
                matrices = [_checked(source, name, shape) for name, shape in zip(expert_entries(layer, expert), ((F, D), (F, D), (D, F)))]
                raw = _bytes(matrices, dtype).ljust(block.size, b"\0")
                sums[-1].append(zlib.crc32(raw))
                file.write(raw)
            at += config.num_experts * block.size
        file.flush()
        os.fsync(file.fileno())   # else a full disk is told of only after the rename, and direct reads would wait for it
    return tuple(offsets), tuple(map(tuple, sums))


def _bytes(matrices: list[Tensor], dtype: str) -> bytes:
    if dtype == "int8":
        weights, scales = zip(*map(quantise, matrices))
        parts = [*weights, *scales]
    else:
        parts = [matrix.to(DTYPES[dtype]) for matrix in matrices]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


# --- what lies beside a checkpoint of our runs ------------------------------------------------------------------------------

def _own_heads(folder: Path) -> dict[str, Path]:
    """The post-hoc heads beside a run's checkpoint, by kind. Several fits of a kind are an error that names them."""
    found = {}
    for kind in PREDICTORS:
        files = sorted(folder.glob(f"posthoc-*_{kind}.safetensors"))
        if len(files) > 1:
            raise ConfigError(f"{folder} holds several {kind} predictors ({', '.join(file.name for file in files)}): name one with heads (--heads {kind}=FILE)")
        if files:
            found[kind] = files[0]
    return found


def own_tokenizer(folder: Path) -> str | None:
    if (folder / TOKENIZER).is_file():
        return TOKENIZER
    run = folder.parent / "config.json"
    try:
        return parse_json(run.read_text())["data"]["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return None   # not a run of ours: prompts are given as token ids


def read_heads(kind: str, path: Path, config: ModelConfig) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The weights in `path` and their horizons, checked against the model."""
    if kind not in PREDICTORS:
        raise ConfigError(f"heads: {kind!r} is unknown; choose one of {', '.join(PREDICTORS)}")
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as the weights of a {kind} predictor: {error}") from None
    horizons = tuple(sorted({int(match[1]) for key in state if (match := re.fullmatch(r"weights\.(\d+)_0", key))}))
    D, E, L = config.hidden_size, config.num_experts, config.num_layers
    expected = head_shapes(kind, horizons, config)
    if not horizons or {key: tuple(tensor.shape) for key, tensor in state.items()} != expected:
        raise ConfigError(f"{path} does not hold a {kind} predictor of this model ({L} layers, width {D}, {E} experts)")
    return state, horizons
