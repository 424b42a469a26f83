"""Small traces, and one in the text of a public format."""

import dataclasses

import numpy as np

from predmoe.traces import Meta, Prediction, build

META = Meta(model="m", num_experts=8, top_k=2, layers=[1, 2, 3], expert_bytes=[10, 20, 30], source="test", on_policy=False, model_layers=5, shared_experts=1)


def skewed(rng, n=40):
    return np.stack([np.stack([rng.choice(8, 2, replace=False, p=np.arange(8, 0, -1) / 36) for _ in range(3)]) for _ in range(n)])


ROUTE = """# route_trace v1
# model=tiny arch=moe n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
# layer=1 expert_bytes=200 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.6,0,100
0,0,0,0,1,1,0.4,0,100
0,0,1,0,0,2,0.7,0,100
0,0,1,0,1,3,0.3,0,0
0,0,1,1,0,0,0.9,0,200
0,0,1,1,1,1,0.1,0,200
0,1,2,0,0,3,0.5,1,0
0,1,2,0,1,2,0.5,1,0
0,1,2,1,0,0,0.5,1,0
0,1,2,1,1,2,0.5,0,200
"""


def sound(n=40, **changes):
    """A trace of 3 layers x 8 experts, top-2, with a predictor at horizons 1 and 2."""
    rng = np.random.default_rng(0)
    guess = lambda h: Prediction(h, np.stack([np.stack([rng.permutation(8)[:4] for _ in range(3)]) for _ in range(n)]), np.tile([0.4, 0.3, 0.2, 0.1], (n, 3, 1)))  # noqa: E731
    trace = build(META, skewed(rng, n), weights_NLK=np.full((n, 3, 2), 0.5), predictions=[("linear", guess(1)), ("linear", guess(2))])
    return dataclasses.replace(trace, **changes)
