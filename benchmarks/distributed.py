"""Two processes that share a batch (DDP, gloo) against one with one thread, and what the prediction term costs, at the size of the cpu tier.

Beside them two processes with half of a batch each that share nothing: what is lacking there to twice the speed of one is the machine's (both cores
have one memory, and half a batch makes smaller products) and the optimizer's (each updates all weights), the rest is communication. The contenders take turns, round by round, and medians are compared. A machine that does other work distorts the first table.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from steps import JOINT, OURS, Stepper, arguments, config_of, markdown, median, write

GOAL = 1.6   # times one process, of two under DDP


def rank(spec: dict) -> None:
    """One of the processes: trains on random tokens when told to; the leader answers with seconds per step."""
    import torch

    from predmoe import distributed
    from predmoe.train import build_parts
    from steps import Batches

    torch.set_num_threads(1)
    config = config_of("cpu", threads=1)
    with distributed.team("cpu") as team:
        trainer = object.__new__(distributed.DistributedTrainer)
        trainer.config, trainer.step, trainer.autocast, trainer.team, trainer.engine, trainer.leader = config, 0, None, team, spec["engine"], team.leader
        trainer.stream = Batches(config.model.vocab_size)
        trainer.model, trainer.predictor, trainer.optimizer = build_parts(config)
        whole = distributed._Whole(trainer.model, trainer.predictor)
        trainer.whole_module = trainer._sharded(whole) if spec["engine"] == "fsdp" else trainer._replicated(whole)
        for count in (spec["warmup"], *[spec["steps"]] * spec["rounds"]):
            go = torch.zeros(1)
            if team.leader:
                sys.stdin.readline()
            torch.distributed.broadcast(go, 0)
            started = time.perf_counter()
            for _ in range(count):
                trainer.training_step()
                trainer.step += 1
            if team.leader:
                print(json.dumps((time.perf_counter() - started) / count), flush=True)


class Pair:
    """Two processes that wait for a line and take their steps together."""

    def __init__(self, engine: str, options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        spec = {"engine": engine, "warmup": options.warmup, "steps": options.steps, "rounds": options.rounds}
        from predmoe import runs

        base = runs.KEEP_MEMORY | os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.engine = engine
        self.processes = [
            subprocess.Popen([sys.executable, str(Path(__file__)), "--rank", json.dumps(spec)], env=base | {"RANK": str(r), "LOCAL_RANK": str(r)}, text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE) for r in range(2)
        ]  # fmt: skip
        self.rounds: list[float] = []
        self.ask()
        self.rounds.clear()

    def ask(self) -> None:
        leader = self.processes[0]
        leader.stdin.write("go\n")
        leader.stdin.flush()
        self.rounds.append(json.loads(leader.stdout.readline()))

    def end(self) -> None:
        for process in self.processes:
            process.communicate()


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return rank(json.loads(sys.argv[2]))
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    options = parser.parse_args()
    from predmoe import budget

    single, joint = (Stepper(name, size="cpu", threads=1, warmup=options.warmup) for name in (OURS, JOINT))
    sequences = config_of("cpu", threads=1).train.batch_size
    halves = [Stepper(OURS, size="cpu", threads=1, warmup=options.warmup, batch_size=sequences // 2) for _ in range(2)]
    pairs = [Pair(engine, options) for engine in options.engines]
    for turn in range(options.rounds):
        for stepper in ((single, joint), (joint, single))[turn % 2]:   # neither is always first
            stepper.rounds.append(stepper.ask({"steps": options.steps}))
        for half in halves:
            half.send({"steps": options.steps})
        for half in halves:
            half.rounds.append(half.receive())
        for pair in pairs:
            pair.ask()
    tokens = single.tokens_per_step
    apart = statistics.median(max(a["wall"], b["wall"]) for a, b in zip(*(half.rounds for half in halves)))
    alone, term = median(single.rounds, "wall"), median(joint.rounds, "wall")
    speed = [{"processes": "1, one thread", "tokens/s": f"{tokens / alone:,.0f}", "of one process": "1.00x"}]
    for pair in pairs:
        seconds = statistics.median(pair.rounds)
        speed.append({"processes": f"2, one thread each ({pair.engine}, gloo)", "tokens/s": f"{tokens / seconds:,.0f}", "of one process": f"{alone / seconds:.2f}x"})
    speed.append({"processes": "2, one thread each, half a batch and nothing shared", "tokens/s": f"{tokens / apart:,.0f}", "of one process": f"{alone / apart:.2f}x"})
    reached = [f"Two processes under DDP were meant to be {GOAL} times as fast as one and are {'not' if alone / seconds < GOAL else 'so'} ({alone / seconds:.2f}x); "
               f"two that share nothing, which is the most that DDP could reach here, are {alone / apart:.2f}x as fast."
               for pair in pairs if pair.engine == "ddp" for seconds in [statistics.median(pair.rounds)]]  # fmt: skip
    operations = budget.flops_per_token(config_of("cpu", threads=1, joint=True))
    ratios = statistics.median(b["wall"] / a["wall"] for a, b in zip(single.rounds, joint.rounds)) - 1   # round by round, since the machine's speed drifts
    cost = (f"The prediction term at full weight takes {ratios:+z.1%} of a step of the cpu tier (one thread), {operations['term'] / operations['model']:.1%} of its operations.")
    for stepper in (single, joint, *halves):
        stepper.end()
    for pair in pairs:
        pair.end()
    text = "\n\n".join([markdown(speed), *reached, cost])
    print(text)
    write(options.json, {"alone": single.rounds, "joint": joint.rounds, "halves": [half.rounds for half in halves], "seconds": {"one": alone, "joint": term, "apart": apart}, "pairs": {p.engine: p.rounds for p in pairs}, "operations": operations}, markdown=text)


if __name__ == "__main__":
    main()
