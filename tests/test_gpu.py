"""The GPU's way through a step, taken on the CPU: the same numbers, and nothing in it that would wait for a device."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from predmoe import gpu, kernels
from predmoe.config import tier
from predmoe.loader import Loader
from predmoe.model import MoEModel, top_k
from predmoe.objectives import dispatches
from predmoe.train import Trainer, TrainingError, build_parts, forward_terms

# Each of these reads a value or a length back from the device.
WAITING = {"_local_scalar_dense", "bincount", "nonzero", "item", "is_nonzero", "masked_select", "unique", "_unique2", "unique_dim", "equal"}


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        assert name not in WAITING, f"{name} waits for the device"
        return function(*arguments, **(keywords or {}))


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Every branch that a GPU takes, grouped_mm included."""
    monkeypatch.setattr(gpu, "on_gpu", lambda x: True)
    monkeypatch.setattr(gpu, "grouped_mm_holds", lambda x, size: True)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(**changes):
    objective = {"lambda_pred": 0.3, "ramp_start": 0.0, "ramp_end": 0.0, "lambda_sticky": 0.1, "lambda_ent": 0.01, "lambda_lookup": 0.1} | changes.pop("objective", {})
    return tier("smoke", model={"vocab_size": 700, "context": 32} | changes.pop("model", {}), train={"batch_size": 4} | changes, objective=objective)


def trainer_of(config):
    """A trainer without a corpus, its values left on the device as on a GPU."""
    from predmoe.token_table import TokenTable

    trainer = object.__new__(Trainer)
    trainer.config, trainer.step, trainer.deferred = config, 5, True
    trainer.autocast = torch.bfloat16 if config.train.dtype == "bfloat16" else None
    trainer.make = lambda step, part: np.random.default_rng([step, part]).integers(0, config.model.vocab_size, (config.train.batch_size, config.model.context + 1))
    trainer.model, trainer.predictor, trainer.optimizer = build_parts(config)
    trainer.table = TokenTable(config.model.num_layers, config.model.vocab_size, config.model.num_experts)
    return trainer


def gradients(config):
    model, predictor, _ = build_parts(config)
    windows = torch.from_numpy(np.random.default_rng(0).integers(0, config.model.vocab_size, (4, config.model.context + 1)))
    parts, _ = forward_terms(model, predictor, windows, config, step=20, autocast=torch.bfloat16 if config.train.dtype == "bfloat16" else None, table=trainer_of(config).table)
    sum(parts.values()).backward()
    return {name: value.item() for name, value in parts.items()}, {name: p.grad for name, p in [*model.named_parameters(), *predictor.named_parameters()]}


def test_the_gpus_way_gives_the_cpus_numbers(as_on_gpu, monkeypatch):
    config = small()
    parts, grads = gradients(config)
    monkeypatch.undo()
    theirs, expected = gradients(config)
    assert parts == pytest.approx(theirs, abs=1e-6)
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name], rtol=1e-4, atol=1e-7, msg=name)


def test_under_bf16_autocast_routers_losses_and_gates_stay_float32_and_the_loss_agrees(as_on_gpu):
    half = small(dtype="bfloat16")
    parts, grads = gradients(half)
    full, _ = gradients(small())
    assert abs(parts["lm"] - full["lm"]) < 0.02 and all(grad.dtype == torch.float32 for grad in grads.values())
    model, *_ = build_parts(half)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))
    assert output.loss.dtype == output.losses_BT.dtype == torch.float32
    assert all(record.logits_NE.dtype == record.gates_NK.dtype == torch.float32 for record in output.routing)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("routing", [{}, {"routing": "early", "early_by": 1}, {"routing": "hash"}, {"top_k": 6}], ids=str)
def test_no_step_waits_for_the_device(as_on_gpu, dtype, routing):
    trainer = trainer_of(small(dtype=dtype, model=routing))
    for _ in range(2):   # the first gives AdamW its moments
        with NoWaiting():
            values = trainer.training_step()
        trainer.step += 1
    assert all(isinstance(value, torch.Tensor) for value in values.values()) and trainer.read(values).keys() == values.keys()


def test_the_check_sees_a_step_that_waits(monkeypatch):
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        trainer_of(small()).training_step()


def test_a_loss_that_is_not_finite_is_found_when_it_is_read(as_on_gpu):
    trainer = trainer_of(small())
    trainer.model.layers[1].router.weight.data.fill_(float("nan"))
    values = trainer.training_step()
    with pytest.raises(TrainingError, match="the loss is not finite at step 5"):
        trainer.read(values)


def test_groups_end_where_their_last_row_is(as_on_gpu):
    flat = torch.tensor([3, 0, 3, 1, 0])
    order = flat.argsort(stable=True)
    assert kernels._groups(flat, order, 5, True).tolist() == [2, 3, 3, 5, 5]   # ends: two of 0, one of 1, none of 2, two of 3, none of 4
    assert kernels._groups(flat, order, 5, False) == [2, 1, 0, 2, 0]


def test_ties_go_to_the_lower_id_and_dispatches_are_counted_the_same(as_on_gpu):
    scores = torch.tensor([[0.25, 0.5, 0.25, 0.5], [1.0, 1.0, 1.0, 1.0]])
    assert top_k(scores, 3)[1].tolist() == [[1, 3, 0], [0, 1, 2]]
    assert dispatches(torch.tensor([[0, 2], [2, 3]]), 5).tolist() == [1, 0, 2, 1, 0]


def test_attention_compiles_as_one_graph_with_the_same_numbers():
    """Traced and differentiated ahead of time, without a code generator: `fullgraph` refuses any break."""
    model = MoEModel(small().model).initialise(0)
    attention = model.layers[0].attention
    x = torch.randn(2, 32, 64, requires_grad=True)
    compiled = torch.compile(attention, fullgraph=True, dynamic=False, backend="aot_eager")
    out = [call(x, model.cos, model.sin) for call in (compiled, attention)]
    torch.testing.assert_close(*out)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in out))


def test_a_compiler_that_fails_is_said_and_recorded(monkeypatch):
    model, told = MoEModel(small().model).initialise(0), []
    monkeypatch.setattr(gpu, "_probe", lambda *_: (_ for _ in ()).throw(RuntimeError("no compiler here\nat all")))
    precision = torch.get_float32_matmul_precision()
    assert gpu.prepare(model, autocast=None, say=told.append) == {"grouped_mm": False, "compiled": False}
    torch.set_float32_matmul_precision(precision)
    assert told == ["grouped_mm does not hold here: experts are computed one after the other", "attention is not compiled (RuntimeError: no compiler here)"]


def test_the_loader_gives_what_is_made_and_makes_the_next_meanwhile():
    made = []

    def make(step, part):
        made.append((step, part))
        return np.array([[step, part]])

    loader = Loader(make, parts=2, pin=False)
    asked = [(0, 0), (0, 1), (1, 0), (7, 1), (8, 0)]   # the fourth is a resumed run's
    assert [loader.batch(*place).tolist() for place in asked] == [[[step, part]] for step, part in asked]
    loader._pool.shutdown()
    assert sorted(made) == [(0, 0), (0, 1), (1, 0), (1, 1), (7, 1), (8, 0), (8, 1)]   # each once; one was made in vain
