"""What a lookup by token id knows of the routing while a model trains: a running count of each id's choices, per layer."""
# V vocabulary, N tokens, E experts, K chosen, L layers

from __future__ import annotations

import torch
from torch import Tensor

from predmoe.predictor import membership

DECAY = 0.99   # a step: routing moves while it is learned, so a choice of 100 steps ago counts a third
PRIOR = 1.0    # choices of the average token that every id starts with: an id never seen tells nothing


class TokenTable:
    """Decayed counts of which experts each token id chose in each layer, (L, V, E) float32, in earlier batches alone."""

    def __init__(self, num_layers: int, vocab_size: int, num_experts: int, device: str | torch.device = "cpu"):
        self.counts_LVE = torch.zeros(num_layers, vocab_size, num_experts, device=device)

    @torch.no_grad()
    def advantage(self, tokens_N: Tensor) -> Tensor:
        """log q(e | token id) - log q(e), (L, N, E): what the id tells of the layer's experts; 0 while nothing is known.

        q(e) is the share of all choices that e received, mixed with an even one so that it is never 0; q(e | id) the
        share of the id's choices, with PRIOR choices at q(e) beside them.
        """
        total_LE = self.counts_LVE.sum(1)
        share_L1E = ((total_LE + 1.0) / (total_LE + 1.0).sum(1, keepdim=True)).unsqueeze(1)
        own_LNE = self.counts_LVE[:, tokens_N]
        return ((own_LNE + PRIOR * share_L1E) / (own_LNE.sum(2, keepdim=True) + PRIOR) / share_L1E).log()

    @torch.no_grad()
    def add(self, tokens_N: Tensor, experts_LNK: Tensor) -> None:
        """Count a batch; all that was counted before fades by DECAY."""
        chosen_LNE = membership(experts_LNK, self.counts_LVE.shape[2])
        self.counts_LVE.mul_(DECAY).index_add_(1, tokens_N, chosen_LNE)
