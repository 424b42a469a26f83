"""Training of one run by several processes, under torchrun: each computes a part of every batch.

DDP keeps the whole model in each process; FSDP2 ("fsdp") keeps a part of it in each and brings a block together while it is
used; "hsdp" does so within each node, every node holding a copy. All train what one process would: the same batches, and statistics over all of them, so that only rounding differs.
"""
# B batch, T time, L layers, N tokens, K chosen, E experts

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from predmoe import sharding, variables
from predmoe.config import ConfigError, RunConfig
from predmoe.data import Tokens
from predmoe.evaluation import Accumulator, Heads, evaluate
from predmoe.files import read_json, write_json
from predmoe.model import MoEModel
from predmoe.objectives import dispatches
from predmoe.predictor import Predictor
from predmoe.train import LOG_EVERY, Trainer, TrainingError, check_device, forward_terms, new_predictor, optimizer_of

ENGINES = ("ddp", "fsdp", "hsdp")
BUCKET_MB = {"cpu": 4, "cuda": 25}   # of gradients that are summed while the rest is computed


def check(config: RunConfig, size: int, engine: str) -> None:
    """Raise ConfigError where `size` processes cannot train the run under this engine."""
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if size < 1:
        raise ConfigError(f"nproc={size} must be at least 1")
    if size > 1 and config.finetune is not None:
        raise ConfigError(f"a fine-tune is trained by one process, not by {size}: start it without --nproc")
    t = config.train
    if t.batch_size // t.accumulate % size:
        raise ConfigError(f"batch_size={t.batch_size} in {t.accumulate} parts cannot be divided among {size} processes: "
                          f"choose a number that divides {t.batch_size // t.accumulate}")  # fmt: skip


def check_nodes(own: list[int]) -> None:
    """Raise ConfigError unless a copy on every node comes out even under hsdp. `own`: for each process, how many its node has."""
    if len(set(own)) > 1 or len(own) % own[0]:
        counts = " or ".join(map(str, sorted(set(own))))
        raise ConfigError(f"hsdp: every node holds a copy, in as many parts as the others; of {len(own)} processes a node has {counts}: start equally many on each node, or take fsdp")


@dataclass(frozen=True)
class Team:
    """The processes of a run, and which of them this one is."""

    rank: int
    size: int
    device: str

    @property
    def leader(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """`value` becomes its sum over all processes."""
        dist.all_reduce(value)
        return value

    def joined(self, value: Tensor, dim: int) -> Tensor:
        """The processes' tensors of equal shape, one after the other along `dim`."""
        parts = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts, dim=dim)

    def gathered(self, value) -> list:
        """Every process's value, in the order of their ranks."""
        parts = [None] * self.size
        dist.all_gather_object(parts, value)
        return parts


@contextlib.contextmanager
def team(device: str) -> Iterator[Team]:
    """The processes that torchrun has started; their connection ends with the context."""
    variables.check()
    check_device(device)
    if device.startswith("cuda"):
        if (own := variables.whole("LOCAL_RANK", 0)) >= (count := torch.cuda.device_count()):
            raise ConfigError(f"process {own} of this machine has no GPU of its own, as there are {count}: start at most {count} processes")
        torch.cuda.set_device(own)
    if lacking := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ConfigError(f"the environment has WORLD_SIZE={world_size()} and no {', '.join(lacking)}: start the processes with torchrun, or unset WORLD_SIZE")
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    except (OSError, RuntimeError, ValueError) as error:   # the port is taken, the host unknown, or somebody is missing at the end of torch's time
        place = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
        raise ConfigError(f"process {os.environ['RANK']} cannot meet the others at {place} (MASTER_ADDR, MASTER_PORT): {_first_words(error)}; "
                          f"see that all {world_size()} processes are started and that the port is free, or choose another") from error  # fmt: skip
    try:
        yield Team(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def connection_lost(error: BaseException) -> bool:
    """Whether an error says that another process of the team cannot be reached: it has ended, or its machine has. (gloo has no error of its own.)"""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _first_words(error: BaseException) -> str:
    """What an error of torch's connections says first, without the line of its source that gloo begins with."""
    return re.sub(r"^\[\S+\] ", "", (str(error).splitlines() or [type(error).__name__])[0]).split(". ")[0][:120]


def lost_sentence(error: BaseException, left: str) -> str:
    """What a process says that has lost the others. `left`: what `children.remains` says of the run."""
    return (f"another process of this run has ended, or cannot be reached any more ({_first_words(error)}), so this one ends as well; what ended the other stands in "
            f"its own node's log; {left}")


def world_size() -> int:
    """How many processes torchrun has started; 1 without it."""
    return variables.whole("WORLD_SIZE", 1, least=1)


class _Whole(nn.Module):
    """Model and heads as one module; what is done within its forward finds their weights whole."""

    def __init__(self, model: MoEModel, predictor: Predictor | None):
        super().__init__()
        self.model, self.predictor = model, predictor

    def forward(self, work):
        return work()


class DistributedTrainer(Trainer):
    """A `Trainer` in each of a team's processes. Only the leader writes logs and undivided files.

    Raises ConfigError as `check`.
    """

    def __init__(self, config: RunConfig, folder: Path, team: Team, *, engine: str = "ddp", **options):
        check(config, team.size, engine)
        self.team, self.engine, self.leader = team, engine, team.leader
        super().__init__(config, folder, **options)
        if not self.leader:
            self.progress = lambda line: None
        whole = _Whole(self.model, self.predictor)
        self.whole_module = self._replicated(whole) if engine == "ddp" else self._sharded(whole)

    def _replicated(self, whole: _Whole) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        kind = torch.device(self.team.device).type
        return DistributedDataParallel(whole, gradient_as_bucket_view=True, forward_sync_buffers=False, bucket_cap_mb=BUCKET_MB[kind])

    def _sharded(self, whole: _Whole) -> nn.Module:
        """Experts and attention of each layer are units of their own; what is left (embeddings, head, routers, norms, heads) is one."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        kind, size, own = torch.device(self.team.device).type, self.team.size, variables.whole("LOCAL_WORLD_SIZE", self.team.size, least=1)
        if self.engine == "hsdp":
            check_nodes(self.team.gathered(own))
            mesh = init_device_mesh(kind, (size // own, own), mesh_dim_names=("copies", "parts"))
        else:
            mesh = init_device_mesh(kind, (size,))
        # Experts compute in bf16 under autocast: sent as bf16 they are half as long and give the same products. Gates stay float32.
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in whole.model.layers:
            fully_shard(layer.experts, mesh=mesh, mp_policy=half if self.autocast else MixedPrecisionPolicy())
            fully_shard(layer.attention, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        self.optimizer = optimizer_of(self.model, self.predictor, self.config.train)   # over the parts
        return whole

    def text(self) -> Tokens:
        """Text that is new here is encoded by the first process of each machine; the others read what it wrote."""
        first = variables.whole("LOCAL_RANK", 0) == 0
        tokens = super().text() if first else None
        self.team.sum(torch.zeros(1))   # whose turn it is: on the host, where waiting may take half an hour
        return tokens or super().text()

    # --- a step ------------------------------------------------------------------------------------------------------

    def rows(self, part: int) -> slice:
        """This process's sequences of a part of the batch."""
        t = self.config.train
        own = t.batch_size // t.accumulate // self.team.size
        first = part * (t.batch_size // t.accumulate) + self.team.rank * own
        return slice(first, first + own)

    def losses(self, windows: Tensor, *, last: bool = True) -> tuple[dict[str, Tensor], Tensor]:
        work = lambda: forward_terms(self.model, self.predictor, windows, self.config, step=self.step, autocast=self.autocast, table=self.table,  # noqa: E731
                                     shares=self._shares)  # fmt: skip
        if self.engine != "ddp":
            self.whole_module.set_requires_gradient_sync(last)
            return self.whole_module(work)
        with contextlib.nullcontext() if last else self.whole_module.no_sync():
            return self.whole_module(work)

    def _shares(self, routing) -> Tensor:
        """(L, E): each expert's share of the dispatches of all processes."""
        E = self.config.model.num_experts
        counts_LE = self.team.sum(torch.stack([dispatches(r.experts_NK, E) for r in routing]).float())
        return counts_LE / (routing[0].experts_NK.numel() * self.team.size)

    def count(self, tokens_N: Tensor, experts_LNK: Tensor) -> None:
        self.table.add(self.team.joined(tokens_N, 0), self.team.joined(experts_LNK, 1))

    def training_step(self) -> dict[str, float | Tensor]:
        """The terms of the whole batch; on a GPU this process's own, until they are read."""
        values = super().training_step()
        return values if self.deferred else self._mean(values)

    def read(self, values: dict[str, float | Tensor]) -> dict[str, float]:
        return super().read(self._mean(values) if self.deferred else values)

    def _mean(self, values: dict) -> dict[str, float]:
        own = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values.values()])
        return dict(zip(values, (self.team.sum(own) / self.team.size).tolist()))

    def agreed(self, wish: int) -> int:
        """The leader's wish, since clocks differ; on a GPU asked for now and then, as asking waits for it."""
        if self.deferred and self.step % LOG_EVERY:
            return 0
        said = torch.tensor([wish])
        dist.broadcast(said, 0)
        return int(said)

    # --- evaluation, files -------------------------------------------------------------------------------------------

    def evaluate_on(self, which: str) -> dict:
        """As `Trainer.evaluate_on`, every process a part of the windows."""
        evalset = getattr(self.tokens, which)(self.config.model.context)
        scorers = {} if self.predictor is None else {"cotrained": Heads(self.predictor)}
        size = min(32, math.ceil(len(evalset.tokens) / self.team.size))
        work = lambda: evaluate(self.model, evalset, self.tokens.domains, self.config.predictor.horizons, scorers, batch_size=size,  # noqa: E731
                                autocast=self.autocast, part=(self.team.rank, self.team.size), join=self._joined)  # fmt: skip
        if self.engine != "ddp":
            with torch.no_grad():
                result = self.whole_module(work)
            self.whole_module.reshard()   # what a backward pass would have done
        else:
            result = work()
        del result["documents"]
        return result

    def _joined(self, own: Accumulator) -> Accumulator:
        on_host = lambda table: {key: value.cpu() for key, value in table.items()}  # noqa: E731
        own.load_LE, own.hit_S, own.exact_S = torch.as_tensor(own.load_LE).cpu(), on_host(own.hit_S), on_host(own.exact_S)
        first, *others = self.team.gathered(own)
        for other in others:
            first.absorb(other)
        return first

    def log(self, **values) -> None:
        if self.leader:
            super().log(**values)

    @contextlib.contextmanager
    def _saving(self):
        """As `Trainer._saving`; that another process has died while all of them save is no fault of the disk."""
        try:
            with super()._saving():
                yield
        except TrainingError as error:
            if error.__cause__ is not None and connection_lost(error.__cause__):
                raise error.__cause__
            raise

    def save(self) -> None:
        if self.engine == "ddp":
            return super().save() if self.leader else None
        with self._saving():
            sharding.save(self, leader=self.leader)

    def restore(self) -> None:
        super().restore()
        dist.barrier()   # nobody writes a checkpoint before everybody has read the last

    def take_up(self, state: dict) -> None:
        if self.engine == "ddp":
            return super().take_up(state)
        sharding.spread(self, state)

    def whole(self) -> tuple[MoEModel, Predictor | None]:
        """Undivided copies for the leader's files; every process takes part in bringing the parts together."""
        if self.engine == "ddp":
            return self.model, self.predictor
        model_state = sharding.whole_state(self.model)
        with torch.device("meta"):
            model = MoEModel(self.config.model)
            predictor = None if self.predictor is None else new_predictor(self.config.predictor, self.config.model)
        model.load_state_dict(model_state, assign=True)
        if predictor is not None:
            predictor.load_state_dict(sharding.whole_state(self.predictor), assign=True)
        return model, predictor

    def finish(self) -> None:
        super().finish()
        dist.barrier()


def description(size: int, engine: str, device: str) -> dict:
    """What a run's provenance says of its processes."""
    return {"processes": size, "engine": engine if size > 1 else "one process", "device": "cuda" if device.startswith("cuda") else "cpu"}


def record(source: Path, how: dict) -> None:
    """Add to provenance.json how a run goes on, where that differs from before; a run of one process alone needs no word of it."""
    found = read_json(source)
    told = found.get("processes", [])
    if told[-1:] != [how] and (told or how["processes"] > 1):
        write_json(source, found | {"processes": [*told, how]})


def report(error: Exception) -> None:
    """Under torchrun: leave the sentence where the launcher finds it."""
    if world_size() > 1:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
