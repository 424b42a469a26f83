"""The exported model as files, and what lies where in an expert's block.

    OUT/manifest.json          version, model, dtype, offsets of the experts, checksums of these, of the other files and of its own entries
    OUT/resident.safetensors   everything that stays in memory: embedding, attention, norms, routers, head
    OUT/heads.safetensors      predictors, where there are any
    OUT/tokenizer.json         the checkpoint's own, where it came with one
    OUT/experts.bin            one block per expert, layer by layer

A block is the expert's gate, up and down projection one after another (int8: then one float32 scale per output row), padded
with zeros to a multiple of the alignment, so that one aligned direct read brings the whole expert.

Every byte that is used is checked: an expert's when it is read, the other files' when they are opened (crc32: a third of a second of a core for a
gigabyte, which is read in any case and stays in the page cache for its use).
"""
# D model width, F expert width, E experts, L layers

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import PREDICTORS, TOKENIZERS, ConfigError, ModelConfig, build, to_dict
from ..files import parse_json

FORMAT, VERSION = "predmoe-engine", 3
MANIFEST, RESIDENT, EXPERTS, HEADS, TOKENIZER = "manifest.json", "resident.safetensors", "experts.bin", "heads.safetensors", "tokenizer.json"
CHECKSUM = "checksum"   # the manifest's entry about all of its others
ALIGNMENT = 4096
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def aligned(size: int, alignment: int) -> int:
    """The least multiple of `alignment` that is not below `size`."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class Block:
    """Sizes of one expert's block, in bytes: `weights` of the three matrices, `payload` with the scales, `size` with the padding."""

    weights: int
    payload: int
    size: int

    @classmethod
    def of(cls, config: ModelConfig, dtype: str, alignment: int) -> Block:
        weights = 3 * config.hidden_size * config.expert_size * DTYPES[dtype].itemsize
        payload = weights + (4 * (2 * config.expert_size + config.hidden_size) if dtype == "int8" else 0)
        return cls(weights, payload, aligned(payload, alignment))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an export holds. `crc32` and `offsets` have one entry per layer and expert; `files`: the other files that are used -> crc32; `heads`: predictor -> its horizons."""

    name: str
    dtype: str
    alignment: int
    model: ModelConfig
    offsets: tuple[tuple[int, ...], ...]
    crc32: tuple[tuple[int, ...], ...]
    files: dict[str, int]
    heads: dict[str, tuple[int, ...]]
    tokenizer: str | None

    @property
    def block(self) -> Block:
        return Block.of(self.model, self.dtype, self.alignment)

    @property
    def experts_bytes(self) -> int:
        return self.model.num_layers * self.model.num_experts * self.block.size

    def save(self, folder: Path) -> None:
        block = self.block
        shapes = {"gate": self._matrix(0), "up": self._matrix(1), "down": self._matrix(2)}
        described = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self), "model": to_dict(self.model),
                     "block": {"bytes": block.size, "payload": block.payload, "parts": shapes}, "experts_bytes": self.experts_bytes}  # fmt: skip
        (folder / MANIFEST).write_text(json.dumps(described | {CHECKSUM: crc32_of_entries(described)}) + "\n")

    def _matrix(self, index: int) -> dict:
        D, F = self.model.hidden_size, self.model.expert_size
        return {"offset": index * D * F * DTYPES[self.dtype].itemsize, "shape": [D, F] if index == 2 else [F, D]}


def other_files(heads: Mapping, tokenizer: str | None) -> list[str]:
    """The files of an export beside the experts and the manifest."""
    return [RESIDENT, *([HEADS] if heads else []), *([TOKENIZER] if tokenizer == TOKENIZER else [])]


def crc32_of(path: Path) -> int:
    """Of a file's bytes, of which few are in memory at a time."""
    found = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            found = zlib.crc32(part, found)
    return found


def crc32_of_entries(described: Mapping) -> int:
    """Of a manifest's entries but CHECKSUM, as canonical JSON: their order and the spaces between them do not count."""
    rest = {name: value for name, value in described.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def check_file(folder: Path, manifest: Manifest, name: str) -> None:
    """Raise ConfigError where a file of the export is not, byte for byte, the one that was written."""
    if crc32_of(folder / name) != manifest.files[name]:
        raise ConfigError(f"{folder / name} is damaged: its bytes are not those that were exported (checksum); export the checkpoint again")


def head_shapes(kind: str, horizons: Iterable[int], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a predictor's heads: name -> shape."""
    D, E, L, deep = config.hidden_size, config.num_experts, config.num_layers, {"linear": 1, "ranking": 2}[kind]
    out = [(i, E if i == deep - 1 else D) for i in range(deep)]
    return {name: shape for h in horizons for i, n in out for name, shape in ((f"weights.{h}_{i}", (L - h, n, D)), (f"biases.{h}_{i}", (L - h, 1, n)))}


def load_manifest(folder: str | Path) -> Manifest:
    """The manifest of an export, checked against its own files. Raises ConfigError for anything that is not a whole export of this version."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {MANIFEST}: it is not an exported model; `predmoe export CHECKPOINT OUT` makes one")
    try:
        found = parse_json(path.read_text())
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ConfigError(f"{path} is not the manifest of an exported model")
        if found.get("version") != VERSION:
            raise ConfigError(f"{path}: version {found.get('version')}, this program reads version {VERSION}; export the checkpoint again")
        if found["dtype"] not in DTYPES:
            raise ConfigError(f"{path}: dtype={found['dtype']!r} is unknown; choose one of {', '.join(DTYPES)}")
        if type(found["alignment"]) is not int or not 512 <= found["alignment"] <= 1 << 30 or found["alignment"] & (found["alignment"] - 1):
            raise ConfigError(f"{path}: alignment={found['alignment']!r} must be a power of two from 512 on")
        if type(found["name"]) is not str or found["tokenizer"] not in (None, TOKENIZER, *TOKENIZERS):
            raise ConfigError(f"{path} is damaged: {'tokenizer' if type(found['name']) is str else 'name'} is not one of an export; export the checkpoint again")
        tuples = {name: tuple(tuple(row) for row in found[name]) for name in ("offsets", "crc32")}
        if wrong := [name for name, rows in tuples.items() if any(type(entry) is not int or not 0 <= entry < 1 << 62 for row in rows for entry in row)]:
            raise ConfigError(f"{path} is damaged: {wrong[0]} must be whole numbers; export the checkpoint again")
        wrong = [kind for kind, horizons in found["heads"].items() if kind not in PREDICTORS or not horizons or not all(type(h) is int and 0 < h for h in horizons)]
        if wrong or sorted(found["files"]) != sorted(other_files(found["heads"], found["tokenizer"])) or not all(type(value) is int for value in found["files"].values()):
            raise ConfigError(f"{path} is damaged: {'heads' if wrong else 'files'} are not those of an export; export the checkpoint again")
        checksum = found[CHECKSUM]
        manifest = Manifest(name=found["name"], dtype=found["dtype"], alignment=found["alignment"], model=build(ModelConfig, found["model"]), **tuples,
                            files=found["files"], heads={kind: tuple(horizons) for kind, horizons in found["heads"].items()}, tokenizer=found["tokenizer"])  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise ConfigError(str(error) if str(error).startswith(str(path)) else f"{path} is damaged: {error}; export the checkpoint again") from None
        raise ConfigError(f"{path} is damaged: {f'it has no {error}' if isinstance(error, KeyError) else error}; export the checkpoint again") from None
    _check_files(folder, manifest)
    if checksum != crc32_of_entries(found):   # last: what is known to be wrong is said by name
        raise ConfigError(f"{path} is damaged: its entries are not those that were exported (checksum); export the checkpoint again")
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name in (EXPERTS, *manifest.files):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} lacks {name}: the export is incomplete; export the checkpoint again")
    shape = (manifest.model.num_layers, manifest.model.num_experts)
    whole = all(len(rows) == shape[0] and all(len(row) == shape[1] for row in rows) for rows in (manifest.offsets, manifest.crc32))
    if not whole or any(offset % manifest.alignment for row in manifest.offsets for offset in row):
        raise ConfigError(f"{folder / MANIFEST}: offsets and checksums must be multiples of {manifest.alignment} and one for each of {shape[0]} layers x {shape[1]} experts")
    size, needed = (folder / EXPERTS).stat().st_size, max(map(max, manifest.offsets)) + manifest.block.size
    if size < needed:
        raise ConfigError(f"{folder / EXPERTS} is cut short: {size} bytes of {needed}; export the checkpoint again")
