"""Training of one run: the loop, its checkpoints and its log. Resumable at any moment, to the same bits.

What a run writes into its folder:
  metrics.jsonl   one line per logged step and per evaluation; no clock in it, so that a resumed run writes the same
  state.pt        weights, optimiser and step; replaced as a whole, so that a kill or a full disk leaves the last good one
  timing.json     seconds and tokens per second
  checkpoint/     the final model as an OLMoE checkpoint, and the heads that were trained with it
"""
# B batch, T time

from __future__ import annotations

import io
import json
import math
import os
import pickle
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from predmoe import gpu, sharding
from predmoe.checkpoint import save_checkpoint
from predmoe.config import ConfigError, RunConfig
from predmoe.data import Tokens, prepare
from predmoe.evaluation import Heads, evaluate
from predmoe.files import read_lines, reason, write_json
from predmoe.finished import discard_other, weights_hash
from predmoe.loader import Loader
from predmoe.model import MoEModel
from predmoe.objectives import stack, terms
from predmoe.predictor import Predictor, restore
from predmoe.token_table import TokenTable

LOG_EVERY = 25  # steps
CHECKPOINT_SECONDS = 60.0
BEGIN_ANEW = "restore it from a copy, or remove it to train the run from its start"


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says at which step and why."""


def learning_rate(config, step: int) -> float:
    """Factor on the learning rate at `step` (from 0): linear warm-up, then cosine to `final_lr_fraction`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * done))


def build_parts(config: RunConfig) -> tuple[MoEModel, Predictor | None, torch.optim.Optimizer]:
    """Initialised model, heads (where lambda_pred > 0) and AdamW. Norm weights and biases do not decay."""
    model = MoEModel(config.model).initialise(config.train.seed).to(config.train.device)
    predictor = None
    if config.objective.lambda_pred:
        predictor = new_predictor(config.predictor, config.model).initialise(config.train.seed).to(config.train.device)
    return model, predictor, optimizer_of(model, predictor, config.train)


def optimizer_of(model: torch.nn.Module, predictor: torch.nn.Module | None, t) -> torch.optim.Optimizer:
    """AdamW over what is trained of both, as the training section `t` says; norm weights and biases do not decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1], "weight_decay": t.weight_decay, "scale": 1.0},
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1], "weight_decay": 0.0, "scale": 1.0},
    ]
    if predictor is not None:
        groups += [
            {"params": list(predictor.weights.values()), "weight_decay": t.weight_decay, "scale": t.predictor_lr_scale},
            {"params": list(predictor.biases.values()), "weight_decay": 0.0, "scale": t.predictor_lr_scale},
        ]
    return torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), fused=True)


def new_predictor(config, model_config) -> Predictor:
    c = model_config
    return Predictor(config, hidden_size=c.hidden_size, num_experts=c.num_experts, num_layers=c.num_layers)


def check_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: no CUDA device here; use device: cpu")


def forward_terms(model, predictor, windows: torch.Tensor, config: RunConfig, *, step: int, autocast: torch.dtype | None, table: TokenTable | None = None,
                  shares=lambda routing: None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # fmt: skip
    """The weighted loss terms of a training step over `windows` (B, T+1), and, where a table counts them, the chosen experts (L, N, K).

    `shares`: what the balance loss takes for a routing (`objectives.balance`). Raises TrainingError where a router's scores are NaN.
    """
    with torch.autocast(windows.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        try:
            output = model(windows[:, :-1], windows[:, 1:])
        except ValueError as error:  # a router's scores are NaN
            raise TrainingError(f"the loss is not finite at step {step} ({error}); lower the learning rate or a term's weight") from error
    parts = terms(output.loss, output.routing, predictor, config.objective, batch=len(windows), progress=step / config.train.steps, table=table,
                  tokens_N=None if table is None else windows[:, :-1].reshape(-1), shares_LE=shares(output.routing))  # fmt: skip
    return parts, stack(output.routing, "experts_NK") if table is not None else None


class Trainer:
    """One run in one folder. `train()` goes on from the last checkpoint and returns when the last step is done, or after
    `pause_after` seconds with a checkpoint. `leader`: whether this process writes what is written once (`distributed`). `owned` is called before
    each write: it ends a process whose run is another one's by now, as after a machine has slept."""

    leader, table, loader, deferred = True, None, None, False

    def __init__(self, config: RunConfig, folder: Path, *, checkpoint_seconds: float = CHECKPOINT_SECONDS, pause_after: float | None = None,
                 progress=lambda line: None, owned=lambda: None):  # fmt: skip
        check_device(config.train.device)
        torch.set_num_threads(config.train.threads)
        self.config, self.folder = config, Path(folder)
        self.checkpoint_seconds, self.pause_after, self.progress, self.owned = checkpoint_seconds, pause_after, progress, owned
        self.tokens: Tokens = self.text()
        if self.tokens.tokenizer.vocab_size > config.model.vocab_size:
            raise ConfigError(f"tokenizer {config.data.tokenizer} has {self.tokens.tokenizer.vocab_size} entries, the model only vocab_size={config.model.vocab_size}")
        self.stream = self.tokens.stream(config.data.order_seed, config.data.shuffle_buffer)
        self.deferred = config.train.device.startswith("cuda")   # values stay on the device until they are read: no step waits for one
        self.device_report: dict = {}
        self.loader = Loader(self.make, parts=config.train.accumulate, pin=True) if self.deferred else None
        self.model, self.predictor, self.optimizer = self.parts()
        m = config.model
        self.table = TokenTable(m.num_layers, m.vocab_size, m.num_experts, config.train.device) if config.objective.lambda_lookup else None
        self.autocast = torch.bfloat16 if config.train.dtype == "bfloat16" else None
        self.step, self.seconds = 0, 0.0

    def text(self) -> Tokens:
        """What it is trained and evaluated on."""
        return prepare(self.config.data)

    def parts(self) -> tuple[torch.nn.Module, Predictor | None, torch.optim.Optimizer]:
        """Model, heads and optimiser at step 0."""
        model, predictor, optimizer = build_parts(self.config)
        if self.deferred:
            self.device_report = gpu.prepare(model, autocast=torch.bfloat16 if self.config.train.dtype == "bfloat16" else None, say=self.progress)
        return model, predictor, optimizer

    def origin(self) -> dict[str, str]:
        """What must be the same when a run goes on, by its name in provenance.json."""
        return {"data_hash": self.tokens.hash}

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> Path:
        return self.folder / "state.pt"

    @property
    def resumable(self) -> bool:
        return self._state.exists() or sharding.saved(self.folder) is not None

    @property
    def _log(self) -> Path:
        return self.folder / "metrics.jsonl"

    @contextmanager
    def _saving(self):
        """Where files are written: on a full disk the last good checkpoint stays and the run stops with a sentence."""
        self.owned()
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a failed write
            kept = "the last good checkpoint stays" if self._state.exists() or (self.folder / sharding.POINTER).exists() else "no earlier checkpoint exists"
            raise TrainingError(f"cannot save step {self.step} in {self.folder}: {reason(error)}; {kept}; free some space and run again") from error

    def save(self) -> None:
        """Replace the checkpoint as a whole or not at all."""
        partial = self._state.with_suffix(".partial")
        heads = self.predictor.state_dict() if self.predictor is not None else None
        state = {"step": self.step, "seconds": self.seconds, "model": self.model.state_dict(), "predictor": heads,
                 "optimizer": self.optimizer.state_dict(), "log_bytes": self._log.stat().st_size}
        if self.table is not None:
            state["table"] = self.table.counts_LVE
        with self._saving():
            try:
                with open(self._log, "rb") as log:  # on the disk before a checkpoint that counts on its bytes
                    os.fsync(log.fileno())
                partial.unlink(missing_ok=True)   # a process that lost the run in its sleep may still have it open
                with open(partial, "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                self.owned()   # writing may have taken long
                partial.replace(self._state)
            except Exception:
                partial.unlink(missing_ok=True)
                raise
        sharding.remove(self.folder)   # of a run that several processes had begun

    def restore(self) -> None:
        """Take up the last checkpoint, if there is one, and cut the log back to it."""
        if sharded := sharding.saved(self.folder):   # written later than a whole one, which it replaces
            return self.restore_sharded(sharded)
        if not self._state.exists():
            if self.leader:
                self._log.write_text("")
            return
        try:
            check_archive(self._state)
            state = torch.load(self._state, map_location=self.config.train.device, weights_only=True)
            self.take_up(state)
            self.step, self.seconds = state["step"], state["seconds"]
            if type(self.step) is not int or not 0 <= self.step <= self.config.train.steps or type(state["log_bytes"]) is not int:
                raise ValueError(f"it says step {self.step!r} of {self.config.train.steps}")
        except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise TrainingError(f"cannot resume from {self._state}: it is damaged or of another run ({why}); {BEGIN_ANEW}") from error
        self.cut_log(state["log_bytes"], self._state)
        self.progress(f"resumed at step {self.step}")

    def take_up(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        if self.predictor is not None:
            self.predictor.load_state_dict(state["predictor"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.table is not None:
            self.table.counts_LVE = state["table"]

    def restore_sharded(self, sharded: dict) -> None:
        """Take up a checkpoint that several processes wrote in parts (`sharding`)."""
        sharding.load(self, sharded)
        self.step, self.seconds = sharded["step"], sharded["seconds"]
        self.cut_log(sharded["log_bytes"], self.folder / sharded["folder"])
        self.progress(f"resumed at step {self.step}")

    def cut_log(self, logged: int, source: Path) -> None:
        """Cut the log to the `logged` bytes that it had when the checkpoint `source` was written."""
        found = self._log.stat().st_size if self._log.exists() else 0
        if found < logged:  # truncate would fill it up with zeros
            raise TrainingError(f"cannot resume from {source}: {self._log.name} has {found} bytes, at step {self.step} it had {logged}; {BEGIN_ANEW}")
        if self.leader:
            os.truncate(self._log, logged)
            read_lines(self._log)   # damage is found out now and not when the run is over

    def log(self, **values) -> None:
        with self._saving(), open(self._log, "a") as file:
            file.write(json.dumps({"step": self.step, **values}) + "\n")

    # --- work --------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        self.restore()
        total, started, saved = self.config.train.steps, time.perf_counter(), time.perf_counter()
        base = self.seconds
        while self.step < total:
            values = self.training_step()
            self.step += 1
            self.seconds = base + time.perf_counter() - started
            if self.step % LOG_EVERY == 0 or self.step in (1, total):
                values = self.read(values)
                self.log(terms=values)
                if self.leader:
                    with self._saving():
                        write_json(self.folder / "timing.json", self.timing())
                self.progress(f"step {self.step}/{total}, loss {values['lm']:.3f}, {self.timing()['tokens_per_second']:,.0f} tokens/s")
            if self.step % self.config.train.eval_every == 0 and self.step < total:
                self.log(dev=self.evaluate_on("dev"))
            paused = self.pause_after is not None and time.perf_counter() - started > self.pause_after and self.step < total
            wish = self.agreed(2 if paused else int(time.perf_counter() - saved > self.checkpoint_seconds))
            if wish or self.step == total:
                self.read(values)   # a model that is not finite is not saved
                self.save()
                saved = time.perf_counter()
                if wish == 2:
                    self.progress(f"paused at step {self.step}/{total}")
                    return
        self.finish()

    def agreed(self, wish: int) -> int:
        """What all processes do now: 0 go on, 1 save, 2 save and pause. One alone does what it wishes."""
        return wish

    def timing(self) -> dict:
        tokens = self.step * self.config.train.batch_size * self.config.model.context
        return {"steps": self.step, "seconds": self.seconds, "tokens_per_second": tokens / max(self.seconds, 1e-9)}

    def training_step(self) -> dict[str, float | torch.Tensor]:
        """One update; returns each weighted term's size in nats, on a GPU still there (`read`). Raises TrainingError where the loss is not finite."""
        config = self.config.train
        seen, values = [], {}
        for part in range(config.accumulate):
            windows = self.windows(part)
            parts, experts_LNK = self.losses(windows, last=part == config.accumulate - 1)
            loss = sum(parts.values())
            if not self.deferred and not torch.isfinite(loss):
                raise self.not_finite(", ".join(f"{name} {value.item():.4g}" for name, value in parts.items()))
            (loss if config.accumulate == 1 else loss / config.accumulate).backward()
            if self.table is not None:
                seen.append((windows[:, :-1].reshape(-1), experts_LNK))
            values = {name: value.detach() / config.accumulate + values.get(name, 0.0) for name, value in parts.items()} if config.accumulate > 1 else parts
        self.clip()
        factor = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * group["scale"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.table is not None:   # after the step: a token is never compared with its own choice
            self.count(torch.cat([tokens_N for tokens_N, _ in seen]), torch.cat([experts_LNK for _, experts_LNK in seen], dim=1))
        return {name: value.detach() for name, value in values.items()} if self.deferred else {name: value.item() for name, value in values.items()}

    def windows(self, part: int) -> torch.Tensor:
        """(B, T+1): the sequences of a part of the batch, on the device."""
        config = self.config.train
        batch = self.loader.batch(self.step, part) if self.loader else torch.from_numpy(self.make(self.step, part))
        return batch.to(config.device, non_blocking=True)

    def make(self, step: int, part: int) -> np.ndarray:
        config = self.config
        return self.stream.batch(step, config.train.batch_size, config.model.context, self.rows(part))

    def rows(self, part: int) -> slice:
        """Which sequences of the batch are of this part."""
        B = self.config.train.batch_size // self.config.train.accumulate
        return slice(part * B, (part + 1) * B)

    def losses(self, windows: torch.Tensor, *, last: bool = True) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Each weighted term over these sequences, and what the router chose, (L, N, K). `last`: the gradient is complete after them."""
        return forward_terms(self.model, self.predictor, windows, self.config, step=self.step, autocast=self.autocast, table=self.table)

    def clip(self) -> None:
        groups = [group["params"] for group in self.optimizer.param_groups]
        parts = (groups[:2], groups[2:]) if self.config.objective.gradient == "none" else (groups,)   # isolated heads do not shorten the backbone's gradient
        for part in parts:
            torch.nn.utils.clip_grad_norm_([p for group in part for p in group], self.config.train.grad_clip)

    def count(self, tokens_N: torch.Tensor, experts_LNK: torch.Tensor) -> None:
        self.table.add(tokens_N, experts_LNK)

    def read(self, values: dict[str, float | torch.Tensor]) -> dict[str, float]:
        """A step's terms as numbers. Raises TrainingError where one is not finite: on a GPU it is found out here, as it never becomes finite again."""
        numbers = {name: float(value) for name, value in values.items()}
        if not all(map(math.isfinite, numbers.values())):
            raise self.not_finite(", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
        return numbers

    def not_finite(self, sizes: str) -> TrainingError:
        return TrainingError(f"the loss is not finite at step {self.step} ({sizes}); lower the learning rate or a term's weight")

    def evaluate_on(self, which: str) -> dict:
        """Diagnostics on "dev" (while training) or "heldout" (at the end), without the per-document detail."""
        evalset = getattr(self.tokens, which)(self.config.model.context)
        scorers = {} if self.predictor is None else {"cotrained": Heads(self.predictor)}
        result = evaluate(self.model, evalset, self.tokens.domains, self.config.predictor.horizons, scorers, autocast=self.autocast)
        del result["documents"]
        return result

    def finish(self) -> None:
        """Final evaluation, the heads and the OLMoE checkpoint, and finished.json, whose existence says that all is there."""
        result = self.evaluate_on("heldout")
        self.log(heldout=result)
        model, predictor = self.whole()
        if not self.leader:
            return
        checkpoint = self.folder / "checkpoint"
        with self._saving():
            try:
                checkpoint.mkdir(exist_ok=True)
                if predictor is not None:
                    partial = checkpoint / "predictor.partial"
                    save_file(predictor.state_dict(), partial)
                    partial.chmod(0o644)   # the library leaves it to its owner alone
                    partial.replace(checkpoint / "predictor.safetensors")
                save_checkpoint(model, checkpoint)
                write_json(self.folder / "timing.json", self.timing())
                finished = {"val_loss": result["val_loss"], "data_hash": self.tokens.hash, "weights": weights_hash(checkpoint)}
                discard_other(self.folder, finished, self.progress)
                write_json(self.folder / "finished.json", finished)
            except Exception:
                for partial in checkpoint.glob("*.partial"):
                    partial.unlink()
                raise
        if sharding.saved(self.folder) is not None:
            sharding.remove(self.folder)
        else:
            self._state.unlink()

    def whole(self) -> tuple[MoEModel, Predictor | None]:
        """Model and heads, undivided."""
        return self.model, self.predictor


def check_archive(path: Path | io.BytesIO) -> None:
    """Raise BadZipFile where a file of torch.save is not what was written: torch itself loads flipped bits without a word."""
    with zipfile.ZipFile(path) as archive:
        if (broken := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {broken} is not that of its bytes")


def load_predictor(folder: Path, config: RunConfig) -> Predictor | None:
    """The heads trained with the backbone, or None where lambda_pred = 0."""
    if not config.objective.lambda_pred:
        return None
    return restore(new_predictor(config.predictor, config.model), folder / "predictor.safetensors")
