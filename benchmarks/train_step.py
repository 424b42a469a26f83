"""Our training step against transformers' OlmoeForCausalLM of the same size, weights and batch, and against a boolean mask per expert.

A step is forward, backward, clipping and AdamW. Every contender has a process of its own; they take turns, round by round,
and medians over the rounds are compared. Prints one markdown table per size and number of threads, and what bounds our step.
"""

from __future__ import annotations

import sys

from steps import JOINT, MASK, MATMUL, OURS, PEAK, SIZES, Stepper, arguments, config_of, markdown, median, write


SLOW, SLOW_ROUNDS = 4.0, 3  # a contender that takes this many times as long as ours sits out after so many rounds


def flops_per_step(config) -> float:
    """Floating-point operations of one training step, as `budget.flops_per_token` counts them."""
    from predmoe import budget

    return sum(budget.flops_per_token(config).values()) * config.train.batch_size * config.model.context


def theirs() -> list[str]:
    """The experts implementations that this version of transformers offers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ["eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]


def compare(size: str, threads: int, names: list[str], options) -> dict:
    """One table: every contender's steps, in turns."""
    print(f"{size}, {threads} thread(s): building", file=sys.stderr, flush=True)
    contenders = [Stepper(name, size=size, threads=threads, warmup=options.warmup, batch_size=options.batch_size) for name in names]
    running = [c for c in contenders if c.failed is None]
    ours = next(c for c in running if c.name == OURS)
    losses = {c.name: c.first_loss for c in running if c.name not in (PEAK, JOINT)}
    if max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"the contenders do not compute the same loss: {losses}")
    for number in range(options.rounds):
        print(f"{size}, {threads} thread(s): round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for c in running:
            if number < SLOW_ROUNDS or c.rounds[0]["wall"] < SLOW * ours.rounds[0]["wall"]:
                c.rounds.append(c.ask({"steps": options.steps}))
    memories = {c.name: c.memory() for c in contenders}  # before the profiler takes its own
    clock = "cpu" if options.cpu_time else "wall"
    peer = min((c for c in running if c.name not in (OURS, JOINT, MASK, PEAK)), key=lambda c: median(c.rounds, clock))
    profiles = {c.name: c.ask({"profile": options.profile_steps})["ms"] for c in running if c.name in (OURS, peer.name)}
    found = []
    for c in contenders:
        c.end()
        row = {"name": c.name, "failed": c.failed, "rounds": c.rounds, "memory": memories[c.name]}
        if c.failed is None:
            row |= {"seconds": median(c.rounds, clock), "tokens_per_second": c.tokens_per_step / median(c.rounds, clock)}
        found.append(row)
    return {"size": size, "threads": threads, "clock": clock, "peer": peer.name, "contenders": found, "profiles": profiles,
            "flops": {n: flops_per_step(config_of(size, threads=threads, batch_size=options.batch_size, joint=n == JOINT)) for n in names}}


def tell(table: dict) -> None:
    rows = {row["name"]: row for row in table["contenders"]}
    peer, peak = rows[table["peer"]], rows.pop(PEAK)
    flops_per_second = 2 * MATMUL**3 / peak["seconds"]
    per_second = "tokens/s" if table["clock"] == "wall" else "tokens per second of CPU time"
    out = []
    for name, row in rows.items():
        mine = name in (OURS, JOINT, MASK)
        label = name if mine else f"transformers, {name}" + (" (fastest)" if row is peer else "")
        if row["failed"]:
            out.append({"contender": label, per_second: "-", "of transformers' fastest": f"not run: {row['failed']}", "ms per step": "-",
                        "memory above imports": "-", "of its memory": "-", "of matmul peak": "-"})
            continue
        out.append({
            "contender": label,
            per_second: f"{row['tokens_per_second']:,.0f}",
            "of transformers' fastest": f"{row['tokens_per_second'] / peer['tokens_per_second']:.2f}x",
            "ms per step": f"{1e3 * row['seconds']:,.0f}",
            "memory above imports": f"{row['memory']['above']:,.0f} MB",
            "of its memory": f"{row['memory']['above'] / peer['memory']['above']:.2f}x",
            "of matmul peak": f"{table['flops'][name] / row['seconds'] / flops_per_second:.0%}",
        })  # fmt: skip
    config = config_of(table["size"], threads=table["threads"])
    m = config.model
    print(f"\n### {table['size']}: d = {m.hidden_size}, {m.num_layers} layers, {m.num_experts} experts of width {m.expert_size}, top-{m.top_k}; {table['threads']} thread(s)\n")
    print(markdown(out))
    print(f"\nMatrix-product peak (float32, {MATMUL}^3, {table['threads']} thread(s)): {flops_per_second / 1e9:.0f} GFLOP/s. "
          f"A step of ours is {table['flops'][OURS] / 1e9:.1f} GFLOP.\n")  # fmt: skip
    ours, other = (table["profiles"][name] for name in (OURS, table["peer"]))
    print(markdown([
        {"where the step's time goes (profiler, ms)": kind, "ours": f"{ours[kind]:.1f}", "share": f"{ours[kind] / sum(ours.values()):.0%}",
         "transformers' fastest": f"{other[kind]:.1f}"} for kind in ours
    ]))  # fmt: skip
    print(f"\nOurs is bound by {sentence(ours)}.")


def short(tables: list[dict]) -> str:
    """One row per size and number of threads: what README.md shows."""
    out = []
    for table in tables:
        rows = {row["name"]: row for row in table["contenders"]}
        ours, peer, mask, peak = (rows[name] for name in (OURS, table["peer"], MASK, PEAK))
        flops_per_second = 2 * MATMUL**3 / peak["seconds"]
        out.append({
            "training step": f"{table['size']}, d = {config_of(table['size'], threads=1).model.hidden_size}, {table['threads']} thread(s)",
            "tokens/s": f"{ours['tokens_per_second']:,.0f}",
            "of transformers' fastest": f"{ours['tokens_per_second'] / peer['tokens_per_second']:.2f}x ({table['peer']})",
            "of its memory": f"{ours['memory']['above'] / peer['memory']['above']:.2f}x",
            "of a boolean mask per expert": f"{ours['tokens_per_second'] / mask['tokens_per_second']:.2f}x",
            "of the matrix-product peak": f"{table['flops'][OURS] / ours['seconds'] / flops_per_second:.0%}",
            "bound by": sentence(table["profiles"][OURS]),
        })  # fmt: skip
    return markdown(out)


def sentence(profile: dict[str, float]) -> str:
    total = sum(profile.values())
    largest = sorted(profile, key=profile.get, reverse=True)[:3]
    return ", ".join(f"{kind} ({profile[kind] / total:.0%})" for kind in largest)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1, help="steps per contender and round: few, so that a change of the machine's speed meets all alike")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--profile-steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, help="sequences per step (default: the cpu tier's)")
    parser.add_argument("--only", nargs="+", metavar="IMPLEMENTATION", help="transformers' implementations to try (default: all)")
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time instead of elapsed time: for a machine that does other work")
    options = parser.parse_args()
    names = [OURS, *(options.only or theirs()), JOINT, MASK, PEAK]
    tables = []
    for size in options.sizes:
        for threads in options.threads:
            tables.append(compare(size, threads, names, options))
            tell(tables[-1])
    write(options.json, {"tables": tables, "rounds": options.rounds, "steps": options.steps}, markdown=short(tables))


if __name__ == "__main__":
    main()
