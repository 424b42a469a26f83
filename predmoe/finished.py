"""A run that has come to its end: which of its files say so, and whether its weights are still those that it ended with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from predmoe.config import ConfigError, RunConfig
from predmoe.files import read_json

TIMING = {"steps": int, "seconds": (int, float), "tokens_per_second": (int, float)}   # what timing.json holds
FINISHED = {"val_loss": (int, float)}   # what finished.json holds, beside hashes of text and weights


def is_complete(folder: Path, config: RunConfig) -> bool:
    """Whether the run is finished and its checkpoint is all there: a clone of a repository has neither weights nor heads."""
    needed = ["config.json", "model.safetensors"] + ["predictor.safetensors"] * bool(config.objective.lambda_pred)
    return is_finished(folder) and all((folder / "checkpoint" / name).exists() for name in needed)


def is_finished(folder: Path) -> bool:
    """Whether the run has come to its end. Raises ConfigError where finished.json is damaged."""
    source = folder / "finished.json"
    return source.exists() and bool(read_json(source, FINISHED, remedy=f"remove it: run {folder.name} is then trained again, to the same bits"))


def weights_hash(checkpoint: Path) -> str:
    """12 hex digits that name the weights of a checkpoint."""
    with open(checkpoint / "model.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def ended_with(folder: Path) -> str | None:
    """The `weights_hash` of what the run in `folder` ended with; None where it has not ended, or was ended before its hash was kept."""
    return read_json(folder / "finished.json", FINISHED).get("weights") if is_finished(folder) else None


def check_weights(folder: Path) -> None:
    """Raise ConfigError where the checkpoint of the finished run in `folder` no longer holds the weights that it ended with."""
    found = weights_hash(folder / "checkpoint")
    if (ended := read_json(folder / "finished.json").get("weights", found)) != found:
        raise ConfigError(f"the checkpoint's weights changed after the run {folder} ended (they were {ended}, now {found}): restore them, or remove the folder to train the run again")


def discard_other(folder: Path, finished: dict, progress=lambda line: None) -> None:
    """Remove the measurements of other weights than those that a training has just `finished` with: those of an earlier training of this run that ended otherwise, on another kind of machine."""
    source = folder / "finished.json"
    known = read_json(source, FINISHED, remedy="remove it") if source.exists() else finished
    if all(known.get(name, value) == value for name, value in finished.items()):
        return
    for described in folder.glob("*.config.json"):
        described.with_name(described.name.replace(".config.json", ".json")).unlink(missing_ok=True)
    progress(f"trained to other bits than before (held-out loss {finished['val_loss']:.6f}, was {known['val_loss']:.6f}), so its measurements are made anew")
