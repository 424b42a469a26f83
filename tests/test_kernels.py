"""The kernels against direct formulas in float64, in value and in every gradient, and what they hold in memory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from watch import Watch

from predmoe import kernels
from predmoe.kernels import grouped_experts, head_loss, rms_norm, rotary, rotate

# N tokens, K chosen experts per token, D model width, F expert width, E experts, V vocabulary, B batch, T time, H heads, C head size

BF16_UNIT = 2.0**-9  # relative error of rounding to bfloat16


def normal(*shape, seed=0, dtype=torch.float64, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative(got, want):
    """Norm of the error over the norm of the reference."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# --- experts ---------------------------------------------------------------------------------------------------------------------

N, K, D, F_, E = 13, 2, 6, 5, 4


def problem(seed=0, dtype=torch.float64, num_experts=E, k=K, tokens=N, avoid=()):
    """x, gates, experts, gate_up, down; no token chooses an expert of `avoid`."""
    rng = np.random.default_rng(seed)
    allowed = [e for e in range(num_experts) if e not in avoid]
    experts = torch.tensor(np.array([rng.permutation(allowed)[:k] for _ in range(tokens)]))
    parts = normal(tokens, D, seed=seed), normal(tokens, k, seed=seed + 1).softmax(1), normal(num_experts, 2 * F_, D, seed=seed + 2), normal(num_experts, D, F_, seed=seed + 3)
    x, gates, gate_up, down = (p.to(dtype).requires_grad_() for p in parts)
    return x, gates, experts, gate_up, down


def experts_by_loop(x, gates, experts, gate_up, down):
    """sum_k gate * down(silu(gate_proj x) * up_proj x), token by token."""
    rows = []
    for n in range(x.shape[0]):
        row = torch.zeros(x.shape[1], dtype=x.dtype)
        for k in range(experts.shape[1]):
            e = int(experts[n, k])
            half = gate_up.shape[1] // 2
            gate, up = gate_up[e, :half] @ x[n], gate_up[e, half:] @ x[n]
            row = row + gates[n, k] * (down[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_experts_equal_the_loop_over_tokens_in_value_and_every_gradient(k):
    x, gates, experts, gate_up, down = problem(k, k=k)
    weight = normal(N, D, seed=9)
    ours, direct = grouped_experts(x, gates, experts, gate_up, down), experts_by_loop(x, gates, experts, gate_up, down)
    assert torch.allclose(ours, direct, rtol=0, atol=1e-12)
    inputs = (x, gates, gate_up, down)
    for got, want in zip(torch.autograd.grad((ours * weight).sum(), inputs), torch.autograd.grad((direct * weight).sum(), inputs)):
        assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_experts_pass_gradcheck():
    x, gates, experts, gate_up, down = problem(5, tokens=7)
    assert torch.autograd.gradcheck(lambda *a: grouped_experts(a[0], a[1], experts, a[2], a[3]), (x, gates, gate_up, down))


def test_experts_in_float32_keep_its_precision():
    x, gates, experts, gate_up, down = problem(2, dtype=torch.float32)
    want = experts_by_loop(x.double(), gates.double(), experts, gate_up.double(), down.double())
    assert relative(grouped_experts(x, gates, experts, gate_up, down), want) < 1e-6


def test_an_expert_without_tokens_gets_a_gradient_of_zero():
    x, gates, experts, gate_up, down = problem(3, avoid=(0, 2))
    grouped_experts(x, gates, experts, gate_up, down).square().sum().backward()
    for grad in (gate_up.grad, down.grad):
        assert not grad[[0, 2]].any() and grad[[1, 3]].abs().amin() > 0


def test_a_token_reads_only_its_own_experts():
    x, gates, experts, gate_up, down = problem(4)
    before = grouped_experts(x, gates, experts, gate_up, down)
    with torch.no_grad():
        gate_up[1] += 1.0
    changed = (grouped_experts(x, gates, experts, gate_up, down) != before).any(1)
    assert torch.equal(changed, (experts == 1).any(1))


def test_the_order_of_a_tokens_experts_does_not_matter():
    x, gates, experts, gate_up, down = problem(6)
    swapped = grouped_experts(x, gates.flip(1), experts.flip(1), gate_up, down)
    assert torch.allclose(swapped, grouped_experts(x, gates, experts, gate_up, down), rtol=0, atol=1e-13)


def test_experts_take_a_gradient_that_is_not_contiguous():
    x, gates, experts, gate_up, down = problem(7)
    out = grouped_experts(x, gates, experts, gate_up, down)
    got = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]  # the gradient of a sum is an expanded scalar
    want = torch.autograd.grad((out * torch.ones(N, D)).sum(), x)[0]
    assert torch.equal(got, want)


def test_experts_are_never_gathered_per_token():
    """No tensor of N x E x F (dense experts) and none of N x K x F x D (weights per token)."""
    tokens, experts_, k = 512, 16, 2
    x, gates, experts, gate_up, down = problem(8, dtype=torch.float32, num_experts=experts_, k=k, tokens=tokens)
    with Watch() as watch:
        grouped_experts(x, gates, experts, gate_up, down).sum().backward()
    assert watch.largest == max(tokens * k * max(2 * F_, D), gate_up.numel()) < tokens * experts_ * F_


# --- head -----------------------------------------------------------------------------------------------------------------------------


def head_problem(n=29, d=6, v=11, seed=0, dtype=torch.float32):
    targets = torch.randint(v, (n,), generator=torch.Generator().manual_seed(seed))
    return normal(n, d, seed=seed, dtype=dtype).requires_grad_(), normal(v, d, seed=seed + 1, dtype=dtype).requires_grad_(), targets


def cross_entropy_by_formula(h, weight, targets):
    """-log softmax(h W')[target] per token in float64."""
    logits = h.double() @ weight.double().T
    return logits.exp().sum(1).log() - logits[torch.arange(len(h)), targets]


@pytest.mark.parametrize("rows", [1, 4, 28, 29, 30, 128])
@pytest.mark.parametrize("block", [1, 3, 11, 512])
def test_head_equals_the_formula_in_value_and_gradients_for_any_chunk_and_block(monkeypatch, rows, block):
    monkeypatch.setattr(kernels, "HEAD_ROWS", rows)
    monkeypatch.setattr(kernels, "HEAD_BLOCK", block)
    h, weight, targets = head_problem()
    loss, losses = head_loss(h, weight, targets)
    h64, weight64 = (p.detach().double().requires_grad_() for p in (h, weight))
    want = cross_entropy_by_formula(h64, weight64, targets)
    assert torch.allclose(losses.double(), want, rtol=0, atol=2e-6)
    assert loss.item() == pytest.approx(want.mean().item(), abs=1e-6)
    (3.0 * loss).backward()
    (3.0 * want.mean()).backward()
    assert relative(h.grad, h64.grad) < 1e-6 and relative(weight.grad, weight64.grad) < 1e-6


def test_head_agrees_with_torch_in_value_and_gradients():
    h, weight, targets = head_problem(n=1300, d=16, v=1100, seed=3)  # the last chunk of rows and the last block of entries are partial
    theirs = F.cross_entropy(F.linear(h, weight), targets)
    ours, _ = head_loss(h, weight, targets)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    for got, want in zip(torch.autograd.grad(ours, (h, weight)), torch.autograd.grad(theirs, (h, weight))):
        assert relative(got, want) < 2e-6


def test_head_by_hand():
    # two tokens of hidden size 1: logits (0, ln 3) and (0, 0)
    h, weight = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [np.log(3.0)]], dtype=torch.float32)
    loss, losses = head_loss(h, weight, torch.tensor([1, 0]))
    assert losses.tolist() == pytest.approx([np.log(4 / 3), np.log(2)], abs=1e-6)
    assert loss.item() == pytest.approx((np.log(4 / 3) + np.log(2)) / 2, abs=1e-6)


@pytest.mark.parametrize("block", [1, 512])
def test_large_logits_do_not_overflow(monkeypatch, block):
    monkeypatch.setattr(kernels, "HEAD_BLOCK", block)
    h, weight = torch.tensor([[100.0]], requires_grad=True), torch.tensor([[10.0], [-10.0]], requires_grad=True)
    loss, _ = head_loss(h, weight, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 2000.0 and h.grad.item() == 20.0 and weight.grad.tolist() == [[100.0], [-100.0]]


def test_only_the_mean_carries_a_gradient():
    h, weight, targets = head_problem()
    loss, losses = head_loss(h, weight, targets)
    assert loss.requires_grad and not losses.requires_grad


def test_a_second_backward_is_refused_not_wrong():
    """Gradients are scaled in place, so a retained graph must not be used twice."""
    h, weight, targets = head_problem()
    loss, _ = head_loss(h, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("training", [True, False])
def test_the_head_never_holds_the_logits_of_all_tokens(training):
    n, d, v = 8 * kernels.HEAD_ROWS, 8, 1000
    h, weight, targets = head_problem(n, d, v)
    with torch.set_grad_enabled(training), Watch() as watch:
        loss, _ = head_loss(h, weight, targets)
        if training:
            loss.backward()
    assert watch.largest == kernels.HEAD_ROWS * kernels.HEAD_BLOCK < kernels.HEAD_ROWS * v <= watch.held < n * v // 4


# --- norm and rotation: float32, against float64 composites and their autograd ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12)])
def test_rms_norm_equals_the_formula_in_value_and_gradients(shape):
    x, weight, out = normal(*shape, dtype=torch.float32).requires_grad_(), normal(12, seed=1, dtype=torch.float32).requires_grad_(), normal(*shape, seed=2)
    x64, weight64 = (p.detach().double().requires_grad_() for p in (x, weight))
    ours = rms_norm(x, weight, 1e-5)
    want = x64 / torch.sqrt((x64**2).mean(-1, keepdim=True) + 1e-5) * weight64
    assert torch.allclose(ours.double(), want, rtol=1e-6, atol=1e-7)
    (ours * out.float()).sum().backward()
    (want * out.float().double()).sum().backward()
    assert relative(x.grad, x64.grad) < 1e-6 and relative(weight.grad, weight64.grad) < 1e-6


def test_rms_norm_agrees_with_torch():
    x, weight = normal(9, 16, dtype=torch.float32), normal(16, seed=1, dtype=torch.float32)
    assert torch.allclose(rms_norm(x, weight, 1e-5), F.rms_norm(x, (16,), weight, 1e-5), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e3])
def test_rms_norm_of_tiny_and_large_inputs(scale):
    """eps decides near zero: the gradient stays finite and right even at x = 0, where it is weight / sqrt(eps)."""
    x = normal(4, 8, scale=scale, dtype=torch.float32).requires_grad_()
    weight = torch.ones(8)
    rms_norm(x, weight, 1e-5).sum().backward()
    x64 = x.detach().double().requires_grad_()
    (x64 * torch.rsqrt((x64**2).mean(-1, keepdim=True) + 1e-5)).sum().backward()
    assert torch.allclose(x.grad.double(), x64.grad, rtol=2e-5, atol=1e-9)
    if scale == 0.0:
        assert x.grad.flatten().tolist() == pytest.approx([1e5**0.5] * 32, rel=1e-6)


def rotate_by_formula(x, theta=10000.0):
    """Each pair (i, i + C/2) of a head turned by position * theta^(-2i/C): a complex product, in float64."""
    T, C = x.shape[1], x.shape[3]
    angle = np.arange(T)[:, None] * theta ** (-2.0 * np.arange(C // 2) / C)
    z = (x[..., : C // 2] + 1j * x[..., C // 2 :]) * np.exp(1j * angle)[None, :, None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


def test_rotation_equals_the_complex_product():
    x = normal(2, 9, 3, 8, dtype=torch.float32)
    assert np.abs(rotate(x, *rotary(9, 3, 8, 10000.0)).numpy() - rotate_by_formula(x.double().numpy())).max() < 2e-6


def test_rotation_passes_gradcheck():
    cos, sin = (table.double() for table in rotary(5, 3, 4, 100.0))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), normal(2, 5, 3, 4).requires_grad_())


def test_the_gradient_of_a_rotation_is_the_rotation_back():
    x, grad = normal(2, 9, 3, 8, dtype=torch.float32).requires_grad_(), normal(2, 9, 3, 8, seed=1, dtype=torch.float32)
    tables = rotary(9, 3, 8, 10000.0)
    rotate(x, *tables).backward(grad)
    assert torch.allclose(rotate(x.grad, *tables), grad, atol=1e-6)


def test_scores_depend_only_on_the_distance():
    q, k = (normal(1, 1, 1, 8, seed=s, dtype=torch.float32).expand(1, 20, 1, 8) for s in (0, 1))
    tables = rotary(20, 1, 8, 10000.0)
    scores = torch.einsum("bthc,bshc->ts", rotate(q, *tables), rotate(k, *tables))
    for distance in range(-19, 20):
        line = scores.diagonal(distance)
        assert (line - line.mean()).abs().max() < 1e-5


# --- bfloat16 autocast ----------------------------------------------------------------------------------------------------------------------


def test_under_autocast_the_experts_compute_in_bfloat16_and_give_float32_gradients():
    """Each of the five roundings on the way (inputs, weights, two activations, output) adds at most one unit."""
    x, gates, experts, gate_up, down = problem(1, dtype=torch.float32, tokens=64)
    with torch.autocast("cpu", torch.bfloat16), Watch() as watch:
        ours = grouped_experts(x, gates, experts, gate_up, down)
    assert ours.dtype == torch.bfloat16 and set(watch.products) == {torch.bfloat16}
    weight = normal(64, D, seed=4, dtype=torch.float32)
    inputs = (x, gates, gate_up, down)
    got = torch.autograd.grad((ours.float() * weight).sum(), inputs)
    exact = experts_by_loop(*(p.double() if p.is_floating_point() else p for p in (x, gates, experts, gate_up, down)))
    want = torch.autograd.grad((exact * weight.double()).sum(), inputs)
    assert relative(ours, exact) < 5 * BF16_UNIT
    for g, w in zip(got, want):
        assert g.dtype == torch.float32 and relative(g, w) < 8 * BF16_UNIT


def test_under_autocast_the_head_sums_its_weight_gradient_in_float32():
    """Rounded once per chunk, as a running sum in bfloat16 would be, 64 chunks would cost far more than one unit."""
    n = 64 * kernels.HEAD_ROWS
    h, weight, targets = head_problem(n, 8, 7)
    with torch.autocast("cpu", torch.bfloat16), Watch() as watch:
        loss, losses = head_loss(h, weight, targets)
    assert set(watch.products) == {torch.bfloat16} and losses.dtype == torch.float32
    loss.backward()
    rounded = [p.detach().bfloat16().double().requires_grad_() for p in (h, weight)]
    want = cross_entropy_by_formula(*rounded, targets).mean()
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=BF16_UNIT)
    assert h.grad.dtype == weight.grad.dtype == torch.float32
    assert relative(weight.grad, rounded[1].grad) < BF16_UNIT
    assert relative(h.grad, rounded[0].grad) < 4 * BF16_UNIT
