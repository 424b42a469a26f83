"""Fake measurements of models of several sizes, paired as 14_ranking_seeds has them."""

from fake_measurements import study

from predmoe import config, scaling
from predmoe.config import to_dict

def sized(name, *, active, seeds=(0, 1, 2), gain=1.0, hidden=96, experts=16, top_k=2):
    """A group of measurements of a model of this shape, its gain scaled."""
    arms = study(seeds=seeds, arms={"baseline": 0.0, "joint": gain})
    run = to_dict(config.tier("cpu"))
    run["model"] |= {"hidden_size": hidden, "num_experts": experts, "top_k": top_k}
    for row in arms:
        row["config"], row["parameters"] = run, {"total": 2 * active, "active": active}
    return {name: arms}


MEASURED = (
    sized("as it stands", active=2_000_000) | sized("small", active=1_000_000, hidden=64, gain=0.5) | sized("large", active=4_000_000, hidden=128, gain=1.5, seeds=(0,))
    | sized("8 experts", active=1_000_000, hidden=64, experts=8) | sized("64 experts", active=1_000_000, hidden=64, experts=64, top_k=8)
)  # fmt: skip
TABLE = scaling.by_size(MEASURED, "ranking")
