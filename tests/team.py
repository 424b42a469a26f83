"""Processes that work as a team in tests: forked from one that has imported torch, each with torchrun's environment."""

import json
import multiprocessing
import os
import socket
import sys

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["predmoe.distributed", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor"])


def together(size, work, *arguments):
    """`work(team, *arguments)` in each of `size` processes; what they return (JSON), by rank. Asserts that all of them ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    environment = dict(os.environ) | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [CONTEXT.Process(target=_member, args=(environment | {"RANK": str(r), "LOCAL_RANK": str(r)}, list(sys.path), pipes[r][1], work, arguments)) for r in range(size)]
    for process, (_, end) in zip(processes, pipes):
        process.start()
        end.close()
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size, f"exit codes {codes}"
    return [json.loads(pipe.recv()) for pipe, _ in pipes]


def _member(environment, path, pipe, work, arguments):
    import torch

    from predmoe import distributed

    os.environ.update(environment)
    sys.path[:] = path
    torch.set_num_threads(1)
    with distributed.team("cpu") as team:
        result = work(team, *arguments)
    pipe.send(json.dumps(result))
