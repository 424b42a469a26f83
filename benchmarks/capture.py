"""What capture at the gates costs: a forward pass of a transformers model with it as a share of one without, and with each record taken.

In each round a captured pass and two plain ones take turns on the same batch: the round's cost is the captured over the mean of the plain
ones, and quoted is the median over the rounds with its distribution-free 95% interval. One plain pass against the other, in the same way, says
how far the machine's own noise goes. The process keeps its freed memory, as the run store's do: without it glibc hands large blocks back to
the system, and a pass is charged thousands of page faults that come and go with the layout of its heap.
"""

from __future__ import annotations

import os
import statistics
import time

from steps import arguments, keep_memory, markdown, write

LAYERS, EXPERTS, CONTEXT = 8, 16, 128
COMMON = dict(vocab_size=8192, num_hidden_layers=LAYERS, max_position_embeddings=CONTEXT, num_experts_per_tok=2, pad_token_id=None, bos_token_id=None,
              eos_token_id=0)  # fmt: skip
LATENT = dict(qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, kv_lora_rank=48, q_lora_rank=48, n_group=4, topk_group=2, n_shared_experts=1,
              first_k_dense_replace=1)  # fmt: skip
FAMILIES = {
    "olmoe": dict(num_experts=EXPERTS),
    "gpt_oss": dict(num_local_experts=EXPERTS, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "deepseek_v3": LATENT | dict(n_routed_experts=EXPERTS),
}
LIMIT = 0.10


def build(family: str, width: int):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    heads = width // 32
    sizes = dict(hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=width, moe_intermediate_size=width)
    config = AutoConfig.for_model(family, **COMMON, **sizes, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def measure(family: str, width: int, batch: int, rounds: int, clock=time.perf_counter) -> dict:
    """Seconds (by `clock`) of each way's passes, round by round, and from them `cost`, `noise` and their intervals."""
    import torch

    from predmoe.hf import capture, find_gates

    model = build(family, width)
    gates, tokens = find_gates(model), torch.randint(8192, (batch, CONTEXT), generator=torch.Generator().manual_seed(0))

    def plain():
        model(input_ids=tokens, use_cache=False)

    def captured():
        with capture(gates) as seen:
            model(input_ids=tokens, use_cache=False)
            seen.take()

    ways = {"plain": plain, "captured": captured, "plain again": plain}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for way in ways.values():
            way()
        for turn in range(rounds):
            order = list(ways)[turn % 3 :] + list(ways)[: turn % 3]   # none is always first
            for name in order:
                begun = clock()
                ways[name]()
                seconds[name].append(clock() - begun)
    once, twice = seconds["plain"], seconds["plain again"]
    cost = over_rounds([c / ((a + b) / 2) - 1 for a, b, c in zip(once, twice, seconds["captured"])])
    noise = over_rounds([b / a - 1 for a, b in zip(once, twice)])
    return {"family": family, "width": width, "tokens": batch * CONTEXT, "gates": len(gates), "seconds": seconds,
            "cost": cost[0], "cost_ci95": cost[1:], "noise": noise[0], "noise_ci95": noise[1:]}  # fmt: skip


def over_rounds(values: list[float]) -> tuple[float, float, float]:
    """The median and its distribution-free 95% interval (of ranks, by the binomial distribution); for less than six values, which allow none, the extremes."""
    from scipy.stats import quantile_test

    low, high = quantile_test(values, p=0.5).confidence_interval(0.95) if len(values) > 5 else (min(values), max(values))
    return statistics.median(values), float(low), float(high)


def share(value: float, interval: tuple[float, float]) -> str:
    return f"{value:+z.1%} [{interval[0]:+z.1%}, {interval[1]:+z.1%}]"


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="of these")
    parser.add_argument("--widths", nargs="+", type=int, default=[96, 256], help="model widths, multiples of 32")
    parser.add_argument("--batch", type=int, default=16, help=f"sequences of {CONTEXT} tokens")
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time: for a machine that does other work")
    options = parser.parse_args()
    keep_memory()
    import torch

    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    found = [measure(family, width, options.batch, options.rounds, clock) for family in options.families for width in options.widths]
    rows = [{
        "model": f"{m['family']}, d = {m['width']}",
        "gates": f"{m['gates']}",
        "forward pass": f"{1e3 * statistics.median(m['seconds']['plain']):,.0f} ms of {m['tokens']:,} tokens",
        "capture": share(m["cost"], m["cost_ci95"]),
        "plain against plain": share(m["noise"], m["noise_ci95"]),
    } for m in found]  # fmt: skip
    table = markdown(rows)
    print(table)
    worst = max(found, key=lambda m: m["cost"])
    answer = (f"Capture at the gates costs at most {share(worst['cost'], worst['cost_ci95'])} of a forward pass ({worst['family']}, d = {worst['width']}; "
              f"median of {options.rounds} rounds, 95% interval); the limit is {LIMIT:.0%}.")  # fmt: skip
    print(f"\n{answer}")
    write(options.json, {"models": found, "limit": LIMIT}, markdown=f"{table}\n\n{answer}")
    if worst["cost"] > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
