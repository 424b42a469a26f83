"""The second measurement of a finished run: how local its routing is in time, and two predictors of a layer's own experts.

It needs the weights, which no repository holds, so it is taken right after training, once, and kept as a small file beside
the post-hoc one (`LocalityConfig` is its address). The two predictors are fitted by the rule of the post-hoc ones:
  pre_attention   the layer's experts from its input before attention (arXiv 2511.10676): known one attention ahead
  next_token      the experts of the *next* token in the same layer, from this token's MoE input: known a whole token ahead
"""
# N tokens, T time, L layers, D model width, E experts, K chosen

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor

from predmoe import locality
from predmoe.config import LocalityConfig, RunConfig, to_dict
from predmoe.data import Tokens
from predmoe.model import MoEModel
from predmoe.posthoc import Activations, capture, fit, training_windows
from predmoe.predictor import Predictor, hit_at_k
from predmoe.simulator import Cache, count
from predmoe.traces import Trace
from predmoe.traces.record import Origin, record

KIND = "ranking"        # the strongest post-hoc predictor
SCH_RATIO = 2.0         # SCH's cache holds twice a token's experts (the paper's headline setting)
POLICIES = ("lru", "belady")


def share_name(share: float) -> str:
    """A cache size as a key of the measurement: 0.25 is "1/4"."""
    return str(Fraction(share).limit_denominator(1000))


# --- locality ----------------------------------------------------------------------------------------------------------

def measure_trace(trace: Trace, config: LocalityConfig) -> dict:
    """Reuse, switch rate, SRP and SCH of segments, and hit rates of LRU and Belady by cache size (a share of a layer's experts).

    Caches are per layer, hold at least one token's experts, begin empty in each sequence, and take a top-k set as one event.
    Raises TraceError where no sequence has a segment.
    """
    E, K = trace.meta.num_experts, trace.meta.top_k
    whole, _ = locality.srp(trace, config.segment)
    slots = {share_name(share): max(K, round(share * E)) for share in config.shares}
    found = {"tokens": trace.num_tokens, "reuse": locality.reuse(trace), "switch_rate": locality.switch_rate(trace), "srp": whole.f1, "srp_size": whole.size_ratio}
    found |= {"sch": locality.sch(trace, config.segment, SCH_RATIO, "layer"), "sch_global": locality.sch(trace, config.segment, SCH_RATIO, "global"), "slots": slots}
    for policy in POLICIES:
        found[policy] = {name: count(trace, Cache(slots=n, policy=policy, scope="layer"), cold="sequence").hit_rate for name, n in slots.items()}
    return found


def heldout_trace(model: MoEModel, run: RunConfig, tokens: Tokens) -> Trace:
    """The routing of the whole held-out set, token by token, a window a sequence."""
    autocast = torch.bfloat16 if run.train.dtype == "bfloat16" else None
    windows = tokens.heldout(run.model.context).tokens[:, :-1]
    return record(model, windows, {}, (), prompt=0, origin=Origin(model=run.hash), autocast=autocast)


# --- predictors of the same layer --------------------------------------------------------------------------------------

@contextmanager
def layer_inputs(model: MoEModel) -> Iterator[list[Tensor]]:
    """Within, each forward pass leaves every layer's input before attention, under the layer's MoE norm, as (N, D) in the list.

    Under that norm the layer's own router can be applied to it as it stands, which is the free floor of this predictor.
    """
    seen: list[Tensor] = []

    def keep(layer):
        return lambda _, args: seen.append(layer.moe_norm(args[0]).reshape(-1, args[0].shape[-1]))

    hooks = [layer.attention_norm.register_forward_pre_hook(keep(layer)) for layer in model.layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def capture_inputs(model: MoEModel, windows, *, autocast: torch.dtype | None = None) -> Activations:
    """`posthoc.capture` of the layers' inputs before attention in place of their MoE inputs."""
    with layer_inputs(model) as seen:

        def taken(_) -> Tensor:
            stacked = torch.stack(seen)
            seen.clear()
            return stacked

        return capture(model, windows, autocast=autocast, inputs=taken)


class NextToken(Activations):
    """Activations of which a row is a token that has a next one: its MoE inputs, and what the next one chose."""

    def __init__(self, of: Activations, T: int):
        """`of`: captured windows of T tokens each."""
        super().__init__(of.hidden_NLD, of.experts_NLK, of.tokens_N.view(-1, T)[:, :-1].reshape(-1))
        self.T = T

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """hidden (L, n, D) float32 of the rows' tokens and experts (L, n, K) int64 of the tokens after them."""
        at = rows + rows // (self.T - 1)   # a window's last token has no next one
        return self.hidden_NLD[at].transpose(0, 1).float().contiguous(), self.experts_NLK[at + 1].transpose(0, 1).long()


@torch.no_grad()
def same_layer_hit(score: Callable[[Tensor], Tensor], held: Activations, batch_tokens: int = 8192) -> float:
    """hit@k over all layers and rows of what `score` makes of inputs (L, n, D): scores (L, n, E) of each layer's own experts."""
    total = 0.0
    for rows in torch.arange(len(held.tokens_N)).split(batch_tokens):
        hidden, experts = held.batch(rows)
        total += hit_at_k(score(hidden), experts) * len(rows)
    return total / len(held.tokens_N)


def own_router(model: MoEModel) -> Callable[[Tensor], Tensor]:
    """Each layer's own router as a predictor that costs nothing: logits (L, n, E) from inputs (L, n, D)."""
    weight_LED = torch.stack([layer.router.weight.detach().float() for layer in model.layers]).cpu()
    return lambda hidden_LND: torch.bmm(hidden_LND, weight_LED.transpose(1, 2))


# --- the whole of it ---------------------------------------------------------------------------------------------------

def measure(model: MoEModel, cotrained: Predictor | None, run: RunConfig, tokens: Tokens, config: LocalityConfig, *, progress=lambda line: None) -> dict:
    """Everything `LocalityConfig` asks of a finished run, over the whole held-out set; hit@k are shares of the true top-k.

    `next_token`: KIND, "previous" (the experts of the token before, which is the reuse) and "cotrained" where the run has such
    heads. `pre_attention`: KIND and "router" (the layer's own router applied early).
    """
    model.requires_grad_(False)
    started, T = time.perf_counter(), run.model.context
    autocast = torch.bfloat16 if run.train.dtype == "bfloat16" else None
    progress("measuring locality")
    result = measure_trace(heldout_trace(model, run, tokens), config)
    seconds = {"trace": time.perf_counter() - started}
    windows = {"train": training_windows(run, tokens, config.fit), "dev": tokens.dev(T).tokens, "heldout": tokens.heldout(T).tokens}
    curves, converged, hit = {}, {}, {"next_token": {"previous": result["reuse"]}, "pre_attention": {}}
    for name, read in (("next_token", capture), ("pre_attention", capture_inputs)):
        begun = time.perf_counter()
        progress(f"{name}: caching activations")
        held = {which: read(model, text, autocast=autocast) for which, text in windows.items()}
        if name == "next_token":
            held = {which: NextToken(activations, T) for which, activations in held.items()}
        predictor, curves[name], converged[name] = fit(KIND, held["train"], held["dev"], run.model, (0,), config.fit, progress=lambda line: progress(f"{name}, {line}"))  # noqa: B023
        scores = {KIND: lambda hidden: predictor(hidden, 0)}  # noqa: B023
        if name == "pre_attention":
            scores["router"] = own_router(model)
        elif cotrained is not None and cotrained.config.next_token:
            scores["cotrained"] = lambda hidden: cotrained.cpu()(hidden, 0)
        hit[name] |= {source: same_layer_hit(score, held["heldout"]) for source, score in scores.items()}
        seconds[name] = time.perf_counter() - begun
        del held   # the next one is as large
    seconds["locality"] = time.perf_counter() - started
    return result | hit | {"config_hash": run.hash, "seed": run.train.seed, "locality_config": to_dict(config), "curves": curves, "converged": converged,
                           "seconds": seconds, "data_hash": tokens.hash}  # fmt: skip

