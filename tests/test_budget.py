"""The plan on paper against what small runs really do: operations, memory, and that the batch's logits never exist."""

import math

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from predmoe import budget, readme
from predmoe.config import TIERS, ConfigError, RunConfig, build, tier
from predmoe.model import count_parameters
from predmoe.train import Trainer, build_parts


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Random:
    """Token batches drawn evenly; the interface of data.Stream."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def batch(self, step, batch_size, context, rows=slice(None)):
        return np.random.default_rng(step).integers(0, self.vocab_size, (batch_size, context + 1))[rows]


def small(*, batch=16, lambda_pred=0.0, kind="linear", dtype="float32", **model) -> RunConfig:
    return build(RunConfig, {
        "model": {"vocab_size": 512, "hidden_size": 64, "num_layers": 4, "num_heads": 2, "expert_size": 64, "num_experts": 8, "top_k": 2, "context": 128} | model,
        "train": {"steps": 10, "batch_size": batch, "lr": 1e-3, "warmup_steps": 0, "dtype": dtype},
        "objective": {"lambda_pred": lambda_pred},
        "predictor": {"horizons": [1, 2], "kind": kind},
    })  # fmt: skip


def step_of(config):
    """The trainer's own step on random tokens, after one that gave AdamW its moments."""
    trainer = object.__new__(Trainer)
    trainer.config, trainer.step, trainer.table, trainer.loader, trainer.deferred = config, 5, None, None, False
    trainer.autocast = torch.bfloat16 if config.train.dtype == "bfloat16" else None
    trainer.stream = Random(config.model.vocab_size)
    trainer.model, trainer.predictor, trainer.optimizer = build_parts(config)
    trainer.training_step()
    return trainer.training_step


def allocations(step) -> tuple[int, int]:
    """(most bytes at a time beyond those before, largest single block) of a call, as torch's allocator counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = sorted((event.start_ns(), event.nbytes()) for event in found.profiler.kineto_results.events() if event.name() == "[memory]")
    sizes = np.array([size for _, size in events])
    return int(np.cumsum(sizes).max()), int(sizes.max())


@pytest.mark.parametrize("change", [
    {}, {"num_layers": 6}, {"hidden_size": 128}, {"expert_size": 256}, {"top_k": 4}, {"num_experts": 32}, {"vocab_size": 4096}, {"num_heads": 8},
    {"lambda_pred": 0.3}, {"lambda_pred": 0.3, "num_layers": 8, "num_experts": 16}, {"batch": 4}, {"batch": 2, "num_experts": 64, "expert_size": 128}, {"context": 256},
    # Under bf16 autocast: what norms keep stays float32, and the weights' copies come to it.
    {"dtype": "bfloat16"}, {"dtype": "bfloat16", "lambda_pred": 0.3, "vocab_size": 4096}, {"dtype": "bfloat16", "batch": 4, "num_experts": 32},
    {"dtype": "bfloat16", "expert_size": 256, "top_k": 4}, {"dtype": "bfloat16", "batch": 2, "num_experts": 64, "expert_size": 128},
], ids=str)  # fmt: skip
def test_a_steps_peak_memory_is_the_formulas_within_a_tenth(change):
    config = small(**change)
    peak, _ = allocations(step_of(config))
    assert budget.step_memory(config)["step"] == pytest.approx(peak, rel=0.10)


def test_the_memory_of_the_cpu_tier_is_the_formulas_within_a_tenth():
    for weight, dtype in ((0.0, "float32"), (0.3, "float32"), (0.3, "bfloat16")):
        config = tier("cpu", objective={"lambda_pred": weight, "ramp_start": 0.0, "ramp_end": 0.0}, train={"batch_size": 8, "dtype": dtype})
        peak, _ = allocations(step_of(config))
        assert budget.step_memory(config)["step"] == pytest.approx(peak, rel=0.10)


def test_the_logits_of_the_whole_batch_are_never_held():
    """No block of memory is as large as they would be, by far: 4096 tokens x 8192 entries."""
    config = small(batch=32, vocab_size=8192, lambda_pred=0.3)
    peak, largest = allocations(step_of(config))
    logits = 32 * 128 * 8192 * 4
    assert largest < logits / 15 and largest <= 1.01 * max(4 * 8192 * 64, 4 * 1024 * 512, 4 * 32 * 128 * 2 * 128)
    assert peak < logits + budget.step_memory(config)["kept"]   # all of it at once, activations included, is not even that much


def test_without_chunks_the_same_check_fails():
    """The check sees a head that forms all logits."""
    config = small(batch=32, vocab_size=8192)
    step = step_of(config)
    trainer = step.__self__
    real = trainer.model.forward

    def whole(tokens, targets):
        output = real(tokens, targets)
        h, _ = trainer.model.body(tokens)
        output.loss = torch.nn.functional.cross_entropy(trainer.model.head(h).flatten(0, 1), targets.flatten())
        return output

    trainer.model.forward = whole
    assert allocations(step)[1] >= 32 * 128 * 8192 * 4


@pytest.mark.parametrize("change", [{}, {"lambda_pred": 0.3}, {"lambda_pred": 0.3, "kind": "ranking"}, {"top_k": 3, "num_experts": 16, "hidden_size": 96}], ids=str)
def test_operations_are_those_that_torch_counts(change):
    """But for attention, of which torch counts the whole square and we the causal half."""
    config = small(batch=2, **change)
    step = step_of(config)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: lambda out, a, b, *_, **__: mm_flop(a, b)}) as counter:   # the head adds in place
        step()
    found, m = counter.get_flop_counts()["Global"], config.model
    tokens = 2 * m.context
    attention = sum(count for name, count in found.items() if "attention" in str(name))
    ours = budget.flops_per_token(config)
    products = sum(ours.values()) * tokens - 6 * m.num_layers * m.hidden_size * (m.context + 1) * tokens
    assert sum(found.values()) - attention == pytest.approx(products, rel=1e-6)


def test_parameters_are_counted_with_the_heads():
    config = tier("a", objective={"lambda_pred": 0.3})
    model, predictor, _ = build_parts(tier("smoke", objective={"lambda_pred": 0.3}))
    found = budget.parameters(tier("smoke", objective={"lambda_pred": 0.3}))
    assert found["total"] == sum(p.numel() for p in model.parameters()) and found["heads"] == sum(p.numel() for p in predictor.parameters())
    assert budget.parameters(config)["heads"] == 29 * (512 * 16 + 16)   # 11 + 10 + 8 pairs, worked by hand
    assert budget.parameters(tier("a"))["heads"] == 0


def test_the_term_costs_less_than_a_twentieth_of_a_step_at_every_tier():
    for name in TIERS:
        found = budget.flops_per_token(tier(name, objective={"lambda_pred": 0.3}))
        assert 0 < found["term"] < 0.05 * found["model"]
    assert budget.flops_per_token(tier("a"))["term"] == 0


def test_seven_billion_by_hand():
    config = budget.seven_b()
    assert count_parameters(config.model)["total"] == pytest.approx(6.92e9, rel=0.01) and count_parameters(config.model)["active"] == pytest.approx(1.28e9, rel=0.01)
    active, L, D, T, V = count_parameters(config.model)["active"], 16, 2048, 4096, 50304
    by_hand = 6 * (active - V * D - (2 * L * 2 + 1) * D) + 6 * L * D * (T + 1)   # 6 per active weight but the embedding and the norms, and attention
    assert budget.flops_per_token(budget.seven_b(0.0))["model"] == pytest.approx(by_hand, rel=1e-9)
    found = budget.plan(config, budget.Cluster(), tokens=100e9, sequences=2, engine="fsdp")
    assert found.flops == pytest.approx(100e9 * sum(budget.flops_per_token(config).values()))
    assert found.steps == round(100e9 / (64 * 2 * 4096))
    assert found.days == pytest.approx(found.steps * max(found.compute_seconds, found.communication["seconds"]) / 86400)
    assert found.gpu_hours == pytest.approx(found.days * 24 * 64) and found.dollars == pytest.approx(2.5 * found.gpu_hours)
    assert found.memory["parts of weights, gradients, moments"] == pytest.approx(16 * 6.92e9 / 64, rel=0.01)
    assert found.communication["scattered"] == pytest.approx(4 * 6.92e9 * 63 / 64, rel=0.01) and found.communication["across"] == 0
    by_node = budget.plan(config, budget.Cluster(), tokens=100e9, sequences=2, engine="hsdp")
    assert by_node.memory["parts of weights, gradients, moments"] == pytest.approx(16 * 6.92e9 / 8, rel=0.01)
    assert by_node.communication["across"] == pytest.approx(2 * 7 / 8 * 4 * 6.92e9 / 8, rel=0.01)
    sent = by_node.communication
    assert sent["seconds"] == pytest.approx((sent["gathered"] + sent["scattered"]) / 450e9 + sent["across"] / 50e9)
    assert sent["seconds"] < found.communication["seconds"]


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"64 sequences of 4096 tokens need \d+ GB on each GPU, of 80 GB: take fewer"):
        budget.plan(budget.seven_b(), budget.Cluster(), tokens=1e9, sequences=64)
    with pytest.raises(ConfigError, match="share_of_peak=1.5 must be at most 1"):
        budget.Cluster(share_of_peak=1.5)


def test_one_process_communicates_nothing_and_more_memory_is_needed_by_fewer():
    config = budget.seven_b()
    assert budget.communication(config, budget.Cluster(gpus=1))["seconds"] == 0
    totals = [budget.sharded_memory(config, budget.Cluster(gpus=n), sequences=1, engine="fsdp")["total"] for n in (8, 64, 512)]
    assert totals[0] > totals[1] > totals[2] and math.isfinite(totals[2])


def test_the_plan_in_the_docs_is_the_functions():
    text = readme.DOCS.read_text()
    assert text == readme.render_docs(text), "docs/many_gpus.md differs from what budget.table gives: run `predmoe readme`"
