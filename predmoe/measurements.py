"""How a finished run is measured: configurations beside that of the run itself, each with a hash that is its measurement's address."""

from __future__ import annotations

from dataclasses import dataclass

from predmoe.strict import SEEDS, ConfigError, at_least, choice, count, later, positive, within

RANKING_LOSSES = ("margin", "margin_all")   # functions of `objectives`
EVAL_TASKS = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "openbookqa", "lambada_openai")   # the harness's own names


@dataclass(frozen=True, kw_only=True)
class PosthocConfig:
    """Fresh predictors on a frozen backbone, trained on cached activations until a dev curve stops improving.

    Every `eval_every` steps the mean dev hit@k is taken; an improvement below `min_gain` divides the learning rate by
    4, and after `patience` such divisions the fit has converged. `max_steps` is a stop that is recorded, not a target.
    `ranking_loss`: what the ranking MLP is fitted with, "margin" (the reference study's) or "margin_all", which still learns where many experts are chosen.
    """

    tokens: int = 196_608
    batch_tokens: int = 2048
    lr: float = 1e-2
    weight_decay: float = 0.0
    eval_every: int = 125
    min_gain: float = 1e-3
    patience: int = 3
    max_steps: int = 6000
    seed: int = 0
    ranking_loss: str = later("margin")

    def __post_init__(self):
        choice("ranking_loss", self.ranking_loss, RANKING_LOSSES)
        for name in ("tokens", "batch_tokens", "eval_every", "patience", "max_steps"):
            count(name, getattr(self, name))
        positive("lr", self.lr)
        within("min_gain", self.min_gain, 0.0, 1.0)
        within("seed", self.seed, *SEEDS)
        at_least("weight_decay", self.weight_decay, 0.0)
        if self.eval_every > self.max_steps:
            raise ConfigError(f"eval_every={self.eval_every} exceeds max_steps={self.max_steps}: the fit would end without one evaluation")


@dataclass(frozen=True, kw_only=True)
class LocalityConfig:
    """The second measurement of a finished run: how local its routing is in time, and two predictors of the same layer.

    `segment`: tokens of a segment of SRP and SCH. `shares`: cache sizes, as fractions of a layer's experts. `fit`: how the
    pre-attention and the next-token predictor are fitted, by the rule of the post-hoc predictors.
    """

    segment: int = 16
    shares: tuple[float, ...] = (0.125, 0.25, 0.5)
    fit: PosthocConfig = PosthocConfig()

    def __post_init__(self):
        count("segment", self.segment)
        if not self.shares or any(not 0 < share <= 1 for share in self.shares) or len(set(self.shares)) != len(self.shares):
            raise ConfigError(f"shares={self.shares} must be distinct fractions of a layer's experts, above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class DownstreamConfig:
    """The third measurement of a finished run: zero-shot tasks of the lm-evaluation-harness, and a cloze task of our own.

    `items`: of each task, drawn with `seed` (0: all). `cloze`: items made of the run's held-out text (0: none). `hub`: tasks come
    from the hub, else from local files. `peer_items`: of each task, scored by the harness's transformers class as well.
    """

    tasks: tuple[str, ...] = EVAL_TASKS
    items: int = 1000
    cloze: int = 1000
    seed: int = 0
    hub: bool = False
    peer_items: int = 50

    def __post_init__(self):
        for task in self.tasks:
            choice("task", task, EVAL_TASKS)
        if len(set(self.tasks)) != len(self.tasks):
            raise ConfigError(f"tasks={self.tasks} must be distinct")
        for name in ("items", "cloze", "seed", "peer_items"):
            at_least(name, getattr(self, name), 0)
        if not self.tasks and not self.cloze:
            raise ConfigError("tasks=() and cloze=0 leave nothing to measure downstream")
