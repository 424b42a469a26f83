"""Configurations: frozen dataclasses that refuse nonsense, built strictly from plain parameters, with a stable hash.

A run is its configuration, so the hash is an address: it must not move when a field is added later. A field that comes
after a release is therefore declared with `later(default)`; it enters the hash only where it differs from its default.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from predmoe.measurements import EVAL_TASKS, DownstreamConfig, LocalityConfig, PosthocConfig  # noqa: F401  likewise
from predmoe.strict import (  # noqa: F401  what uses configurations has the machinery from here
    SEEDS, ConfigError, at_least, build, choice, coerce, count, device, later, momentum, positive, shown, stable_hash, to_dict, within,
)  # fmt: skip

ROUTINGS = ("topk", "early", "hash")
PREDICTORS = ("linear", "ranking")
TARGETS = ("topk", "soft", "membership")
GRADIENTS = ("input", "both", "none")
TRAINED = ("lora", "half", "full", "none")
DTYPES = ("float32", "bfloat16")
MOST_THREADS = 4096
TOKENIZERS = ("bpe8k", "gpt2")   # ours; a fine-tune of a checkpoint may name another


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder: an OLMoE block of `num_layers` layers; its checkpoints are OLMoE checkpoints.

    `routing`: "topk" chooses from the layer's own MoE input; "early" from the MoE input of layer max(l - early_by, 0)
    (after Pre-gated MoE, arXiv 2308.12066); "hash" fixes the experts by token id (Hash Layers, arXiv 2106.04426).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    expert_size: int
    num_experts: int
    top_k: int
    context: int
    norm_topk_prob: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    init_std: float = 0.02
    routing: str = "topk"
    early_by: int = 0

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "expert_size", "num_experts", "context"):
            count(name, getattr(self, name))
        for name in ("rope_theta", "rms_norm_eps", "init_std"):
            positive(name, getattr(self, name))
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"top_k={self.top_k} must lie in 1..num_experts={self.num_experts}")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ConfigError(f"hidden_size={self.hidden_size} must be num_heads={self.num_heads} times an even head size")
        choice("routing", self.routing, ROUTINGS)
        if self.routing == "early":
            within("early_by", self.early_by, 1, self.num_layers - 1)
        elif self.early_by:
            raise ConfigError(f"early_by={self.early_by} needs routing='early', not {self.routing!r}")


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """Heads per (layer, horizon): "linear" (d -> E) or "ranking" (d -> d -> E, GELU, margin loss; arXiv 2511.10676).

    `next_token`: besides, a head per layer that says from a token's MoE input what the *next* token of its sequence
    chooses in the same layer; with it the horizons may be left out.
    """

    kind: str = "linear"
    horizons: tuple[int, ...] = (1, 2, 4)
    next_token: bool = later(False)

    def __post_init__(self):
        choice("predictor kind", self.kind, PREDICTORS)
        nothing = not self.horizons and not self.next_token
        if nothing or any(h < 1 for h in self.horizons) or len(set(self.horizons)) != len(self.horizons):
            raise ConfigError(f"horizons={shown(self.horizons)} must be distinct positive layer counts")

    @property
    def depths(self) -> tuple[int, ...]:
        """The horizons, then 0 for the heads of the same layer where there are some."""
        return self.horizons + (0,) * self.next_token


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Weights and forms of the loss terms (METHOD.md, "Training objective").

    `ramp_start`, `ramp_end`: fractions of training between which lambda_pred rises linearly from 0 to its value; equal
    values at 0 mean no ramp. `gradient`: "input" reaches the backbone through the predictor's input alone; "both" also
    through the target router (straight-through where the target is hard); "none" does not reach it: the heads are trained beside it (isolation).

    `lambda_lookup`: weight of the penalty on what a lookup by token id knows of the routing (`objectives.familiarity`).
    """

    balance: float = 0.01
    lambda_pred: float = 0.0
    target: str = "topk"
    gradient: str = "input"
    ramp_start: float = 0.0
    ramp_end: float = 0.0
    lambda_sticky: float = 0.0
    lambda_ent: float = 0.0
    lambda_lookup: float = later(0.0)

    def __post_init__(self):
        for name in ("balance", "lambda_pred", "lambda_sticky", "lambda_ent", "lambda_lookup"):
            at_least(name, getattr(self, name), 0.0)
        choice("target", self.target, TARGETS)
        choice("gradient", self.gradient, GRADIENTS)
        if not 0.0 <= self.ramp_start <= self.ramp_end <= 1.0:
            raise ConfigError(f"ramp_start={self.ramp_start}, ramp_end={self.ramp_end} must satisfy 0 <= start <= end <= 1")


def corpus_name(spec: str) -> tuple[str, str]:
    """What the corpus `spec` is and what follows its colon: ("files", "a.txt,b.txt"). Raises ConfigError where there is no such corpus; whether its text
    can be had is for `corpora` to find out."""
    name, colon, rest = spec.partition(":")
    if name == "fineweb-edu" and colon and not (rest.isdecimal() and int(rest)):
        raise ConfigError(f"corpus={spec!r}: what follows the colon must be a number of documents, as in fineweb-edu:40000")
    if name == "files" and not rest.strip(","):
        raise ConfigError(f"corpus={spec!r} names no path; write files:PATH[,PATH...]")
    if name not in ("fineweb-edu", "files") and spec not in ("offline", "offline-large"):
        raise ConfigError(f"corpus={spec!r} is unknown; choose offline, fineweb-edu[:DOCUMENTS], offline-large or files:PATH[,PATH...]")
    return name, rest


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, in which tokens, in which order; `heldout_tokens` and `dev_tokens` fix the two sets never trained on.

    `corpus`: "offline" and "offline-large" (pinned packages), "fineweb-edu[:DOCUMENTS]" (hub), or "files:PATH[,PATH...]" (local .txt, .md, .jsonl).
    """

    corpus: str = "offline"
    tokenizer: str = "bpe8k"
    order_seed: int = 0
    shuffle_buffer: int = 1000
    heldout_tokens: int = 65_536
    dev_tokens: int = 32_768

    def __post_init__(self):
        corpus_name(self.corpus)
        count("order_seed", self.order_seed, 0, SEEDS[1])
        for name in ("shuffle_buffer", "heldout_tokens", "dev_tokens"):
            count(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation. `batch_size` counts sequences of the model's context; `threads` is part of the run's identity, since
    float addition is not associative: the same seed and thread count give the same bits. How many processes share a batch is
    not: it changes the rounding alone, and a run's provenance says it.

    `accumulate`: equal parts that a batch is computed in, one after the other, to save memory. The balance loss takes its
    statistics from a part, whatever the number of processes, so this does change what is trained.
    """

    steps: int
    batch_size: int
    lr: float
    warmup_steps: int
    final_lr_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    predictor_lr_scale: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    eval_every: int = 250
    accumulate: int = later(1)

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_every", "accumulate"):
            count(name, getattr(self, name))
        if self.batch_size % self.accumulate:
            raise ConfigError(f"batch_size={self.batch_size} must be a multiple of accumulate={self.accumulate}: its parts are of equal size")
        count("threads", self.threads, 1, MOST_THREADS)
        count("warmup_steps", self.warmup_steps, 0)
        for name in ("lr", "grad_clip", "predictor_lr_scale"):
            positive(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            momentum(name, getattr(self, name))
        within("final_lr_fraction", self.final_lr_fraction, 0.0, 1.0)
        at_least("weight_decay", self.weight_decay, 0.0)
        choice("dtype", self.dtype, DTYPES)
        device(self.device)
        within("seed", self.seed, *SEEDS)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What a run starts from, where that is a trained model, and what of it is trained (`finetune`).

    `stock`: a run of the same store, trained first where it is missing; or `checkpoint`: the folder or hub id of an OLMoE model.
    `trained`: "lora" (adapters of `rank` and `alpha` on attention and experts; routers as they are), "half" (all weights of the last half of the
    blocks), "full" (all weights) or "none" (the model as it is; only heads are trained, where there are some).
    """

    stock: RunConfig | None = None
    checkpoint: str = ""
    trained: str = "lora"
    rank: int = 16
    alpha: int = 32

    def __post_init__(self):
        if (self.stock is None) == (not self.checkpoint):
            raise ConfigError("a fine-tune starts from one model: give either stock, a run, or checkpoint, a folder or hub id")
        if self.stock is not None and self.stock.model.routing != "topk":
            raise ConfigError(f"stock: routing={self.stock.model.routing!r} is not OLMoE's, only a model with routing='topk' can be fine-tuned")
        choice("trained", self.trained, TRAINED)
        for name in ("rank", "alpha"):
            count(name, getattr(self, name))

    @property
    def identity(self) -> dict:
        """What of it enters a run's hash: the stock run by its own, and of an adapter only where there is one."""
        adapter = {"rank": self.rank, "alpha": self.alpha} if self.trained == "lora" else {}
        return {"from": self.checkpoint if self.stock is None else self.stock.hash, "trained": self.trained} | adapter

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """Raise ConfigError unless a run of this shape and text can start from the stock run."""
        if self.trained == "lora" and self.rank > (most := max(model.hidden_size, model.expert_size)):
            raise ConfigError(f"rank={self.rank} must be at most {most}, the larger side of the model's matrices: a larger one adds nothing")
        if self.stock is None:
            return   # looked at when it is loaded
        found = self.stock.model
        if model.context > found.context:
            raise ConfigError(f"context={model.context} is longer than that of the stock model, {found.context}")
        if other := [f.name for f in dataclasses.fields(model) if f.name != "context" and getattr(model, f.name) != getattr(found, f.name)]:
            raise ConfigError(f"{other[0]}={getattr(model, other[0])!r} is not the stock model's, {getattr(found, other[0])!r}: a fine-tune keeps its shape")
        if data.tokenizer != self.stock.data.tokenizer:
            raise ConfigError(f"tokenizer={data.tokenizer!r} is not the stock model's, {self.stock.data.tokenizer!r}: its ids mean other text")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One trained model: the address of a run in the store.

    `predictor` gives the horizons, and the heads trained with the backbone where lambda_pred > 0. Without that term the
    predictor and the form of the term change nothing, so they do not enter the hash: there is one baseline per seed.
    `finetune`: the trained model that it starts from, and which weights it trains; without it all of them, from nothing.
    """

    model: ModelConfig
    train: TrainConfig
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    predictor: PredictorConfig = PredictorConfig()
    finetune: FinetuneConfig | None = later(None)

    def __post_init__(self):
        if self.finetune is not None:
            self.finetune.check(self.model, self.data)
        else:
            choice("tokenizer", self.data.tokenizer, TOKENIZERS)
        for name in ("heldout_tokens", "dev_tokens"):
            if getattr(self.data, name) < self.model.context:  # else it would be said at the end of training
                raise ConfigError(f"{name}={getattr(self.data, name)} must be at least one context of {self.model.context} tokens")
        deepest = max(self.predictor.horizons, default=0)
        if not deepest:
            raise ConfigError("horizons=() leaves nothing to measure: a run needs at least one horizon")
        if deepest >= self.model.num_layers:
            raise ConfigError(f"horizons={shown(self.predictor.horizons)}: horizon {shown(deepest)} must be below num_layers={self.model.num_layers}")

    @property
    def hash(self) -> str:
        start = {} if self.finetune is None else {"finetune": self.finetune.identity}
        if self.objective.lambda_pred:
            return stable_hash(self, **start)
        plain = ObjectiveConfig()
        unused = {name: getattr(plain, name) for name in ("target", "gradient", "ramp_start", "ramp_end")}
        scale = dataclasses.replace(self.train, predictor_lr_scale=1.0)
        objective = dataclasses.replace(self.objective, **unused)
        return stable_hash(self, train=scale, objective=objective, predictor=PredictorConfig(), **start)


@dataclass(frozen=True)
class Tier:
    """A named size: the model, its training defaults and its predictor fit. `predmoe.config.tier` builds runs from it."""

    model: ModelConfig
    train: TrainConfig
    data: DataConfig = DataConfig()
    posthoc: PosthocConfig = PosthocConfig()
    objective: ObjectiveConfig = ObjectiveConfig()


_RAMPED = ObjectiveConfig(ramp_start=0.1, ramp_end=0.5)
_REFERENCE_TRAIN = TrainConfig(steps=6000, batch_size=8, lr=3e-4, warmup_steps=200, dtype="bfloat16", device="cuda")
_REFERENCE_DATA = DataConfig(corpus="fineweb-edu", tokenizer="gpt2")

TIERS = {
    # A minute on two CPU cores: shows that every part works, says nothing about the question.
    "smoke": Tier(
        model=ModelConfig(vocab_size=8192, hidden_size=64, num_layers=6, num_heads=2, expert_size=64, num_experts=8, top_k=2, context=64),
        train=TrainConfig(steps=40, batch_size=16, lr=2e-3, warmup_steps=8, predictor_lr_scale=5.0, eval_every=20),
        data=DataConfig(heldout_tokens=8192, dev_tokens=4096),
        posthoc=PosthocConfig(tokens=16_384, batch_tokens=512, eval_every=25, max_steps=200, patience=2),
        objective=_RAMPED,
    ),
    # Two CPU cores, minutes per run: the recipe of the committed report (docs in the README).
    "cpu": Tier(
        model=ModelConfig(vocab_size=8192, hidden_size=96, num_layers=8, num_heads=2, expert_size=96, num_experts=16, top_k=2, context=128),
        train=TrainConfig(steps=1000, batch_size=16, lr=1e-3, warmup_steps=100, predictor_lr_scale=5.0),
        objective=_RAMPED,
    ),
    # The reference's tiers B and A (METHOD.md). Its experts have two matrices, ours three (SwiGLU), so expert_size is
    # two thirds of the reference's and the parameter counts agree within 5%.
    "b": Tier(
        model=ModelConfig(vocab_size=50257, hidden_size=384, num_layers=8, num_heads=6, expert_size=688, num_experts=8, top_k=2, context=512),
        train=_REFERENCE_TRAIN, data=_REFERENCE_DATA, posthoc=PosthocConfig(tokens=524_288),
    ),
    "a": Tier(
        model=ModelConfig(vocab_size=50257, hidden_size=512, num_layers=12, num_heads=8, expert_size=944, num_experts=16, top_k=2, context=512),
        train=_REFERENCE_TRAIN, data=_REFERENCE_DATA, posthoc=PosthocConfig(tokens=524_288),
    ),
}


def tier(name: str, *, seed: int | None = None, finetune: FinetuneConfig | dict | None = None, **sections) -> RunConfig:
    """The run of tier `name`; `sections` (model, train, data, objective, predictor) are dicts of changed fields. `finetune`: what it starts from.

    `seed` is the initialisation seed (train.seed). Raises ConfigError for an unknown tier, section, field or type.
    """
    choice("tier", name, tuple(TIERS))
    base = TIERS[name]
    parts = {name: to_dict(getattr(base, name)) for name in ("model", "train", "data", "objective")}
    parts["predictor"] = to_dict(PredictorConfig())
    for section, changes in sections.items():
        if section not in parts:
            raise ConfigError(f"unknown section {section!r}; a run has {', '.join(parts)}")
        if not isinstance(changes, dict):
            raise ConfigError(f"section {section!r} is a mapping of changed fields, not {changes!r}")
        parts[section] |= changes
    if seed is not None:
        parts["train"]["seed"] = seed
    return build(RunConfig, parts | {"finetune": finetune})
