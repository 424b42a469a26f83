"""Every loss term, in one place. All are means in nats (or squared probability for `sticky`), computed in float32."""
# B batch, T time, N = B*T tokens, E experts, K chosen, L layers, S source layers of a horizon

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from predmoe import gpu
from predmoe.config import ObjectiveConfig
from predmoe.model import Routing
from predmoe.predictor import Predictor, membership
from predmoe.token_table import TokenTable


def dispatches(experts_NK: Tensor, num_experts: int) -> Tensor:
    """How many tokens chose each expert, (E,). On a GPU without waiting for it: bincount reads a length back."""
    if gpu.on_gpu(experts_NK):
        return membership(experts_NK, num_experts).sum(0)
    return torch.bincount(experts_NK.reshape(-1), minlength=num_experts)


def balance(logits_NE: Tensor, experts_NK: Tensor, share_E: Tensor | None = None) -> Tensor:
    """Switch load balancing (arXiv 2101.03961) of one layer: E * sum_e share of dispatches * mean router probability.

    1 for uniform use, E where one expert takes everything. The gradient flows through the probabilities alone.
    `share_E`: the shares of a batch of which these tokens are a part; the mean over its parts is then the whole batch's term.
    """
    E = logits_NE.shape[1]
    if share_E is None:
        share_E = dispatches(experts_NK, E).float() / experts_NK.numel()
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
    gradient "input" and "none": the targets are constants. "both": the gradient also reaches the target router: exactly for "soft",
    and straight-through for the hard targets (value of the hard target, slope of the router's probability).
    """
    probs_SNE = logits_SNE.float().softmax(-1)
    if gradient != "both":
        probs_SNE = probs_SNE.detach()
    through = probs_SNE - probs_SNE.detach()  # zero, with the probability's slope
    if target == "topk":
        goal = membership(experts_SNK, logits_SNE.shape[-1]) / experts_SNK.shape[-1] + through
        return -(goal * predicted_SNE.float().log_softmax(-1)).sum(-1).mean()
    if target == "soft":
        log_p = logits_SNE.float().log_softmax(-1)
        log_p = log_p if gradient == "both" else log_p.detach()
        return (probs_SNE * (log_p - predicted_SNE.float().log_softmax(-1))).sum(-1).mean()
    goal = membership(experts_SNK, logits_SNE.shape[-1]) + through
    return F.binary_cross_entropy_with_logits(predicted_SNE.float(), goal)


def margin(predicted_SNE: Tensor, experts_SNK: Tensor) -> Tensor:
    """Ranking loss (arXiv 2511.10676): the weakest true expert must beat the strongest intruder by 1; mean over rows."""
    chosen = membership(experts_SNK, predicted_SNE.shape[-1]).bool()
    weakest = predicted_SNE.masked_fill(~chosen, float("inf")).amin(-1)
    strongest = predicted_SNE.masked_fill(chosen, float("-inf")).amax(-1)
    return F.relu(1.0 - weakest + strongest).mean()


def margin_all(predicted_SNE: Tensor, experts_SNK: Tensor) -> Tensor:
    """`margin` asked of every expert: each true one must beat the strongest intruder by 1, and the weakest true one each intruder; mean over the
    true experts and mean over the others, half and half, then over rows. 1 where all scores are equal, as in `margin`.

    `margin` moves two scores of a row. Where many experts are chosen it nearly always finds a pair in the wrong order, so that equal scores, which cost 1,
    are close to its best; here the experts in the right order still learn.
    """
    K, E = experts_SNK.shape[-1], predicted_SNE.shape[-1]
    true_SNK = predicted_SNE.gather(-1, experts_SNK)
    others_SNE = predicted_SNE.masked_fill(membership(experts_SNK, E).bool(), float("-inf"))
    weakest, strongest = true_SNK.amin(-1, keepdim=True), others_SNE.amax(-1, keepdim=True)
    true, others = F.relu(1.0 - true_SNK + strongest).mean(), F.relu(1.0 - weakest + others_SNE).sum(-1).mean()
    return (true + others / max(1, E - K)) / 2


def familiarity(logits_LNE: Tensor, experts_LNK: Tensor, advantage_LNE: Tensor) -> Tensor:
    """What a lookup by token id knows of the realized routing, in nats: the mean over layers, tokens and chosen experts of
    log q(e | token id) / q(e) (`TokenTable.advantage`), an estimate of the mutual information of token id and expert.

    The estimate q is a constant of earlier batches. The gradient is straight-through, as in `prediction`: value of the hard
    choice, slope of the router's probability, which moves away from the experts that the lookup would name.
    """
    probs_LNE = logits_LNE.float().softmax(-1)
    chosen_LNE = membership(experts_LNK, logits_LNE.shape[-1]) / experts_LNK.shape[-1] + probs_LNE - probs_LNE.detach()
    return (chosen_LNE * advantage_LNE).sum(-1).mean()


def stack(routing: list[Routing], name: str) -> Tensor:
    """One field of all layers' records as (L, N, ...)."""
    return torch.stack([getattr(record, name) for record in routing])


def prediction_of(predictor: Predictor, routing: list[Routing], objective: ObjectiveConfig, *, batch: int | None = None) -> Tensor:
    """L_pred: mean over all (layer, horizon) pairs, by the predictor's own loss where it is the ranking kind.

    With heads for the next token, each layer is one pair more: the MoE input of token t against the choice of token t + 1 in
    the same layer, over the tokens that have a next one; `batch` then says how many sequences are laid one after the other.
    """
    hidden, logits, experts = (stack(routing, n) for n in ("hidden_ND", "logits_NE", "experts_NK"))
    hidden = hidden.detach() if objective.gradient == "none" else hidden
    total, pairs = hidden.new_zeros(()), 0
    for h in predictor.config.depths:
        if h:
            guess, true_logits, true = predictor(hidden, h), logits[h:], experts[h:]
        else:
            guess, true_logits, true = predictor(_all_but(hidden, batch, last=True), 0), _all_but(logits, batch, last=False), _all_but(experts, batch, last=False)
        if predictor.config.kind == "ranking":
            term = margin(guess, true)
        else:
            term = prediction(guess, true_logits, true, target=objective.target, gradient=objective.gradient)
        total, pairs = total + term * guess.shape[0], pairs + guess.shape[0]
    return total / pairs


def _all_but(field_LNX: Tensor, batch: int | None, *, last: bool) -> Tensor:
    """(L, B * (T - 1), X): without each sequence's last token, or without its first."""
    L, _, X = field_LNX.shape
    if batch is None:
        raise ValueError("heads for the next token need batch, the number of sequences: no sequence's first token follows another's last")
    field_LBTX = field_LNX.view(L, batch, -1, X)
    return (field_LBTX[:, :, :-1] if last else field_LBTX[:, :, 1:]).reshape(L, -1, X)


def ramp(objective: ObjectiveConfig, progress: float) -> float:
    """The factor in 0..1 on lambda_pred when the fraction `progress` of training is done."""
    if progress >= objective.ramp_end:
        return 1.0
    if progress <= objective.ramp_start:
        return 0.0
    return (progress - objective.ramp_start) / (objective.ramp_end - objective.ramp_start)


def terms(lm_loss: Tensor, routing: list[Routing], predictor: Predictor | None, objective: ObjectiveConfig, *, batch: int,
          progress: float, table: TokenTable | None = None, tokens_N: Tensor | None = None, shares_LE: Tensor | None = None) -> dict[str, Tensor]:
    """Each active term, weighted: their sum is the training loss, their values its shares in nats.

    `table` and `tokens_N`, the batch's token ids, are needed where lambda_lookup is set; the table is read, not changed.
    `shares_LE`: as `balance` takes them, where the batch is divided among processes.
    """
    mean = lambda values: torch.stack(values).mean()  # noqa: E731
    shares = [None] * len(routing) if shares_LE is None else shares_LE
    out = {"lm": lm_loss, "balance": objective.balance * mean([balance(r.logits_NE, r.experts_NK, share_E) for r, share_E in zip(routing, shares)])}
    if predictor is not None:
        out["pred"] = objective.lambda_pred * ramp(objective, progress) * prediction_of(predictor, routing, objective, batch=batch)
    if objective.lambda_sticky:
        out["sticky"] = objective.lambda_sticky * mean([sticky(r.logits_NE, batch) for r in routing])
    if objective.lambda_ent:
        out["ent"] = objective.lambda_ent * mean([entropy(r.logits_NE) for r in routing])
    if objective.lambda_lookup:
        out["lookup"] = objective.lambda_lookup * familiarity(stack(routing, "logits_NE"), stack(routing, "experts_NK"), table.advantage(tokens_N))
    return out
