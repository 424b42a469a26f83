"""Every loss term, in one place. All are means in nats (or squared probability for `sticky`), computed in float32."""
# B batch, T time, N = B*T tokens, E experts, K chosen, L layers, S source layers of a horizon

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from predmoe.config import ObjectiveConfig
from predmoe.model import Routing
from predmoe.predictor import Predictor, membership


def balance(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Switch load balancing (arXiv 2101.03961) of one layer: E * sum_e share of dispatches * mean router probability.

    1 for uniform use, E where one expert takes everything. The gradient flows through the probabilities alone.
    """
    N, E = logits_NE.shape
    share_E = torch.bincount(experts_NK.reshape(-1), minlength=E).float() / experts_NK.numel()
    return E * (share_E * logits_NE.float().softmax(-1).mean(0)).sum()


def entropy(logits_NE: Tensor) -> Tensor:
    """Mean entropy in nats of the router distribution: the sharpening penalty."""
    log_p = logits_NE.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def sticky(logits_NE: Tensor, batch: int) -> Tensor:
    """Mean squared change (summed over experts) of the router distribution between adjacent tokens of a sequence
    (StickyMoE, arXiv 2607.08780). `batch` sequences of equal length are laid one after the other in N."""
    p_BTE = logits_NE.float().softmax(-1).view(batch, -1, logits_NE.shape[-1])
    return (p_BTE[:, 1:] - p_BTE[:, :-1]).square().sum(-1).mean()


def prediction(predicted_SNE: Tensor, logits_SNE: Tensor, experts_SNK: Tensor, *, target: str, gradient: str) -> Tensor:
    """Mean over source layers and tokens of the prediction loss of one horizon, in nats.

    predicted_SNE: predictor logits; logits_SNE, experts_SNK: router logits and realized top-k of the target layers.
    target "topk": cross-entropy to mass 1/k on each realized expert (the reference's term); "soft": KL(router || predictor);
    "membership": binary cross-entropy of top-k membership, mean over experts.
    gradient "input": the targets are constants. "both": the gradient also reaches the target router: exactly for "soft",
    and straight-through for the hard targets (value of the hard target, slope of the router's probability).
    """
    probs_SNE = logits_SNE.float().softmax(-1)
    if gradient == "input":
        probs_SNE = probs_SNE.detach()
    through = probs_SNE - probs_SNE.detach()  # zero, with the probability's slope
    if target == "topk":
        goal = membership(experts_SNK, logits_SNE.shape[-1]) / experts_SNK.shape[-1] + through
        return -(goal * predicted_SNE.float().log_softmax(-1)).sum(-1).mean()
    if target == "soft":
        log_p = logits_SNE.float().log_softmax(-1)
        log_p = log_p.detach() if gradient == "input" else log_p
        return (probs_SNE * (log_p - predicted_SNE.float().log_softmax(-1))).sum(-1).mean()
    goal = membership(experts_SNK, logits_SNE.shape[-1]) + through
    return F.binary_cross_entropy_with_logits(predicted_SNE.float(), goal)


def margin(predicted_SNE: Tensor, experts_SNK: Tensor) -> Tensor:
    """Ranking loss (arXiv 2511.10676): the weakest true expert must beat the strongest intruder by 1; mean over rows."""
    chosen = membership(experts_SNK, predicted_SNE.shape[-1]).bool()
    weakest = predicted_SNE.masked_fill(~chosen, float("inf")).amin(-1)
    strongest = predicted_SNE.masked_fill(chosen, float("-inf")).amax(-1)
    return F.relu(1.0 - weakest + strongest).mean()


def stack(routing: list[Routing], name: str) -> Tensor:
    """One field of all layers' records as (L, N, ...)."""
    return torch.stack([getattr(record, name) for record in routing])


def prediction_of(predictor: Predictor, routing: list[Routing], objective: ObjectiveConfig) -> Tensor:
    """L_pred: mean over all (layer, horizon) pairs, by the predictor's own loss where it is the ranking kind."""
    hidden, logits, experts = (stack(routing, n) for n in ("hidden_ND", "logits_NE", "experts_NK"))
    total, pairs = hidden.new_zeros(()), 0
    for h in predictor.config.horizons:
        guess = predictor(hidden, h)
        if predictor.config.kind == "ranking":
            term = margin(guess, experts[h:])
        else:
            term = prediction(guess, logits[h:], experts[h:], target=objective.target, gradient=objective.gradient)
        total, pairs = total + term * guess.shape[0], pairs + guess.shape[0]
    return total / pairs


def ramp(objective: ObjectiveConfig, progress: float) -> float:
    """The factor in 0..1 on lambda_pred when the fraction `progress` of training is done."""
    if progress >= objective.ramp_end:
        return 1.0
    if progress <= objective.ramp_start:
        return 0.0
    return (progress - objective.ramp_start) / (objective.ramp_end - objective.ramp_start)


def terms(lm_loss: Tensor, routing: list[Routing], predictor: Predictor | None, objective: ObjectiveConfig, *, batch: int,
          progress: float) -> dict[str, Tensor]:
    """Each active term, weighted: their sum is the training loss, their values its shares in nats."""
    mean = lambda values: torch.stack(values).mean()  # noqa: E731
    out = {"lm": lm_loss, "balance": objective.balance * mean([balance(r.logits_NE, r.experts_NK) for r in routing])}
    if predictor is not None:
        out["pred"] = objective.lambda_pred * ramp(objective, progress) * prediction_of(predictor, routing, objective)
    if objective.lambda_sticky:
        out["sticky"] = objective.lambda_sticky * mean([sticky(r.logits_NE, batch) for r in routing])
    if objective.lambda_ent:
        out["ent"] = objective.lambda_ent * mean([entropy(r.logits_NE) for r in routing])
    return out
