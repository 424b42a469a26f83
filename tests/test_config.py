"""Configurations: what is refused and how, and hashes that stay where they are."""

import dataclasses
import json

import pytest

from predmoe import paths
from predmoe.config import (
    TIERS, ConfigError, DataConfig, LocalityConfig, ModelConfig, ObjectiveConfig, PosthocConfig, PredictorConfig, RunConfig, TrainConfig, build, later, stable_hash,
    tier, to_dict,
)

# Addresses of runs in the store. A hash here changes only where a tier's own recipe is changed, in which case every run
# and committed result of that tier is stale: re-run them, then put the new hash here. A change that was not meant to
# touch a recipe (a new field, a renamed one, another serialisation) must not move them: declare a new field `later(...)`.
GOLDEN = {
    "smoke": ("29d2e49198dc", "b0c34eb71f3c", "c608ce3b22c3"),
    "cpu": ("76038573bbee", "be6801ad8971", "d020602aa887"),
    "b": ("389a692dc2ca", "c0da79e0ff52", "5d9cd3abb536"),
    "a": ("21c62401671b", "5019cb3c4305", "5d9cd3abb536"),
}


# --- what is refused: one sentence that names the parameter ---------------------------------------------------------------


def refused(call, *words):
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_an_unknown_tier_is_refused_with_the_known_ones():
    refused(lambda: tier("c"), "'c'", "smoke, cpu, b, a")


def test_an_unknown_section_is_refused_with_the_known_ones():
    refused(lambda: tier("smoke", optimiser={"lr": 1e-3}), "optimiser", "model, train, data, objective, predictor")


def test_a_section_that_is_no_mapping_is_refused():
    refused(lambda: tier("smoke", train=0.001), "train", "0.001")


@pytest.mark.parametrize(
    "section, change, words",
    [
        ("objective", {"lambda_predd": 0.3}, ("lambda_predd", "ObjectiveConfig", "lambda_pred,")),
        ("objective", {"lambda_pred": "3e-1"}, ("lambda_pred='3e-1'", "is str, not float", "YAML reads 3e-1 as text: write 3.0e-1")),
        ("objective", {"lambda_pred": True}, ("lambda_pred=True", "is bool, not float")),
        ("objective", {"lambda_pred": None}, ("lambda_pred=None", "not float")),
        ("objective", {"lambda_pred": -0.1}, ("lambda_pred=-0.1", "at least 0")),
        ("objective", {"lambda_pred": float("nan")}, ("lambda_pred=nan",)),
        ("objective", {"target": "top-k"}, ("'top-k'", "topk, soft, membership")),
        ("objective", {"gradient": "all"}, ("'all'", "input, both")),
        ("objective", {"ramp_start": 0.6}, ("ramp_start=0.6", "ramp_end=0.5")),
        ("train", {"steps": True}, ("steps=True", "is bool, not int")),
        ("train", {"steps": 10.0}, ("steps=10.0", "is float, not int")),
        ("train", {"steps": 0}, ("steps=0", "at least 1")),
        ("train", {"lr": 0}, ("lr=0.0", "positive")),
        ("train", {"lr": "3e-4"}, ("lr='3e-4'", "str")),
        ("train", {"grad_clip": 0.0}, ("grad_clip=0.0", "positive")),
        ("train", {"beta2": 1.5}, ("beta2=1.5", "at least 0 and below 1")),
        ("train", {"beta1": 1.0}, ("beta1=1.0", "below 1")),
        ("train", {"beta1": -0.1}, ("beta1=-0.1", "at least 0")),
        ("train", {"final_lr_fraction": 1.1}, ("final_lr_fraction=1.1", "0.0..1.0")),
        ("train", {"warmup_steps": -1}, ("warmup_steps=-1", "at least 0")),
        ("train", {"threads": 10**6}, ("threads=1000000", "at most 4096")),
        ("train", {"weight_decay": -0.1}, ("weight_decay=-0.1",)),
        ("train", {"seed": "0"}, ("seed='0'", "str")),
        ("train", {"device": "tpu"}, ("'tpu'", "cpu, cuda")),
        ("train", {"dtype": "float16"}, ("'float16'", "float32, bfloat16")),
        ("model", {"top_k": 9}, ("top_k=9", "num_experts=8")),
        ("model", {"top_k": 0}, ("top_k=0", "1..num_experts=8")),
        ("model", {"norm_topk_prob": 1}, ("norm_topk_prob=1", "is int, not bool")),
        ("model", {"num_heads": 3}, ("hidden_size=64", "num_heads=3")),
        ("model", {"num_layers": 4}, ("horizon 4", "num_layers=4")),
        ("model", {"routing": "random"}, ("'random'", "topk, early, hash")),
        ("model", {"routing": "early"}, ("early_by=0", "1..5")),
        ("model", {"routing": "early", "early_by": 6}, ("early_by=6", "1..5")),
        ("model", {"early_by": 1}, ("early_by=1", "routing='early'")),
        ("predictor", {"horizons": [1, 6]}, ("horizon 6", "num_layers=6")),
        ("predictor", {"horizons": [0, 1]}, ("horizons=(0, 1)",)),
        ("predictor", {"horizons": [2, 2]}, ("horizons=(2, 2)", "distinct")),
        ("predictor", {"horizons": []}, ("horizons=()",)),
        ("predictor", {"horizons": 1}, ("horizons=1", "int")),
        ("predictor", {"horizons": [1, "2"]}, ("horizons[1]='2'",)),
        ("predictor", {"kind": "mlp"}, ("'mlp'", "linear, ranking")),
        ("predictor", {"horizons": [], "next_token": True}, ("horizons=()", "at least one horizon")),
        ("predictor", {"next_token": 1}, ("next_token=1", "is int, not bool")),
        ("objective", {"lambda_lookup": -0.1}, ("lambda_lookup=-0.1", "at least 0")),
        ("data", {"heldout_tokens": 0}, ("heldout_tokens=0",)),
        ("model", {"rope_theta": 0}, ("rope_theta=0.0", "positive")),
        ("model", {"rope_theta": -1.0}, ("rope_theta=-1.0", "positive")),
        ("model", {"rms_norm_eps": 0.0}, ("rms_norm_eps=0.0", "positive")),
        ("model", {"init_std": -0.02}, ("init_std=-0.02", "positive")),
    ],
)
def test_nonsense_is_refused_by_name(section, change, words):
    refused(lambda: tier("smoke", **{section: change}), *words)


SECTIONS = [TIERS["smoke"].model, TIERS["smoke"].train, ObjectiveConfig(), DataConfig(), PosthocConfig(), LocalityConfig()]
FIELDS = [(section, f.name) for section in SECTIONS for f in dataclasses.fields(section) if type(getattr(section, f.name)) in (int, float)]


@pytest.mark.parametrize("section, name", FIELDS, ids=lambda value: value if isinstance(value, str) else type(value).__name__)
def test_no_number_is_without_bounds(section, name):
    """Whatever is added: neither endless nor undefined where a fraction is taken, nor beyond all memory where things are counted."""
    fractions = isinstance(getattr(section, name), float)
    for value in (float("inf"), float("-inf"), float("nan")) if fractions else (10**30, -(10**30)):
        with pytest.raises(ConfigError, match=f"{name}="):
            dataclasses.replace(section, **{name: value})


def test_a_missing_parameter_is_named():
    refused(lambda: build(TrainConfig, {"steps": 1, "batch_size": 1, "lr": 0.1}), "TrainConfig", "warmup_steps")


def test_a_configuration_is_built_from_a_mapping():
    refused(lambda: build(RunConfig, [1, 2]), "RunConfig", "list")


def test_a_fit_without_a_single_evaluation_is_refused():
    refused(lambda: PosthocConfig(eval_every=100, max_steps=99), "eval_every=100", "max_steps=99")


def test_horizons_below_the_number_of_layers_are_taken():
    assert tier("smoke", model={"num_layers": 5}).model.num_layers == 5  # the deepest horizon is 4


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tier("smoke").train.lr = 1.0


# --- what is built ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIERS)
def test_a_run_survives_json(name):
    run = tier(name, seed=3, objective={"lambda_pred": 0.3}, predictor={"kind": "ranking", "horizons": [1, 3]})
    again = build(RunConfig, json.loads(json.dumps(to_dict(run))))
    assert again == run and again.hash == run.hash and again.predictor.horizons == (1, 3)


def test_an_int_is_taken_for_a_float_and_is_the_same_run():
    whole = tier("smoke", objective={"lambda_pred": 1})
    assert type(whole.objective.lambda_pred) is float and whole.hash == tier("smoke", objective={"lambda_pred": 1.0}).hash


def test_a_tier_changes_only_what_is_asked():
    base, changed = to_dict(tier("cpu")), to_dict(tier("cpu", seed=7, train={"lr": 0.5}))
    base["train"] |= {"seed": 7, "lr": 0.5}
    assert changed == base


# --- the hash: an address ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIERS)
def test_the_addresses_of_the_tiers_do_not_move(name):
    baseline, joint = tier(name), tier(name, objective={"lambda_pred": 0.3})
    assert (baseline.hash, joint.hash, stable_hash(TIERS[name].posthoc)) == GOLDEN[name]


COMMITTED = sorted((paths.ROOT / "outputs").glob("*/runs/*/config.json"))


@pytest.mark.skipif(not COMMITTED, reason="no run is committed")
def test_every_committed_run_is_still_at_its_address():
    """Rules added later refuse none of them and move none."""
    for path in COMMITTED:
        assert build(RunConfig, json.loads(path.read_text())).hash == path.parent.name
    for kind, cls in (("posthoc", PosthocConfig), ("locality", LocalityConfig)):
        for path in (paths.ROOT / "outputs").glob(f"*/runs/*/{kind}-*.config.json"):
            assert f"{kind}-{stable_hash(build(cls, json.loads(path.read_text())))}.config.json" == path.name


def with_later(cls, value=1.5):
    """`cls` of the same name with a field more, as a later release would have it."""
    return dataclasses.make_dataclass(cls.__name__, [("added", float, later(value))], bases=(cls,), frozen=True, kw_only=True)


@pytest.mark.parametrize("config", [ObjectiveConfig(lambda_pred=0.3), PredictorConfig(), DataConfig(), PosthocConfig(), TIERS["cpu"].model, TIERS["cpu"].train])
def test_a_field_added_later_moves_the_hash_only_where_it_is_used(config):
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    grown = with_later(type(config))
    assert stable_hash(grown(**values)) == stable_hash(config)
    assert stable_hash(grown(**values, added=1.5)) == stable_hash(config)
    assert stable_hash(grown(**values, added=1.0)) != stable_hash(config)


def test_a_later_field_of_a_section_does_not_move_the_run():
    run = tier("smoke", objective={"lambda_pred": 0.3})
    values = {f.name: getattr(run.objective, f.name) for f in dataclasses.fields(run.objective)}
    assert dataclasses.replace(run, objective=with_later(ObjectiveConfig)(**values)).hash == run.hash
    assert dataclasses.replace(run, objective=with_later(ObjectiveConfig)(**values, added=2.0)).hash != run.hash


def other(value):
    """A valid value of a field that differs from `value`."""
    choices = {"topk": "soft", "input": "both", "float32": "bfloat16", "bfloat16": "float32", "cpu": "cuda", "cuda": "cpu", "offline": "fineweb-edu", "bpe8k": "gpt2"}
    if isinstance(value, bool):
        return not value
    return choices.get(value, value + "x") if isinstance(value, str) else value + (1 if isinstance(value, int) else 0.01)


@pytest.mark.parametrize("section", ["train", "data", "objective"])
def test_every_field_of_a_joint_run_is_in_its_address(section):
    run = tier("smoke", objective={"lambda_pred": 0.3})
    hashes = {run.hash}
    for name, value in to_dict(getattr(run, section)).items():
        changed = {"objective": {"lambda_pred": 0.3}}
        changed[section] = changed.get(section, {}) | {name: other(value)}
        hashes.add(tier("smoke", **changed).hash)
    assert len(hashes) == 1 + len(dataclasses.fields(getattr(run, section)))


def test_a_model_of_another_size_or_routing_is_another_run():
    changes = [{}, {"expert_size": 65}, {"norm_topk_prob": False}, {"routing": "hash"}, {"routing": "early", "early_by": 1}, {"routing": "early", "early_by": 2}]
    assert len({tier("smoke", model=change).hash for change in changes}) == len(changes)


def test_one_baseline_whatever_predictor_it_is_compared_with():
    """Without the term, its form and its heads change nothing that is trained."""
    forms = [
        {}, {"predictor": {"kind": "ranking"}}, {"predictor": {"horizons": [1]}}, {"objective": {"target": "soft"}}, {"objective": {"gradient": "both"}},
        {"objective": {"ramp_start": 0.0, "ramp_end": 0.0}}, {"train": {"predictor_lr_scale": 1.0}},
    ]
    assert {tier("smoke", **form).hash for form in forms} == {GOLDEN["smoke"][0]}
    joint = [{**form, "objective": {**form.get("objective", {}), "lambda_pred": 0.3}} for form in forms]
    assert len({tier("smoke", **form).hash for form in joint}) == len(forms)


def test_a_shallow_baseline_has_an_address_too():
    """Fewer layers than the default predictor looks ahead."""
    shallow = {"model": {"num_layers": 3}, "predictor": {"horizons": [1, 2]}}
    assert tier("smoke", **shallow).hash == tier("smoke", **(shallow | {"predictor": {"horizons": [1]}})).hash != tier("smoke").hash


def test_a_baseline_with_another_control_is_another_run():
    controls = [{}, {"lambda_sticky": 1.0}, {"lambda_ent": 0.01}, {"balance": 0.0}]
    assert len({tier("smoke", objective=c).hash for c in controls}) == len(controls)
    assert tier("smoke", seed=1).hash != tier("smoke", seed=0).hash
    assert tier("smoke", data={"order_seed": 1}).hash != tier("smoke").hash


def test_a_lookup_penalty_is_another_run_and_heads_for_the_next_token_only_of_a_joint_one():
    joint = {"objective": {"lambda_pred": 0.3}}
    assert tier("smoke", objective={"lambda_lookup": 0.1}).hash != tier("smoke").hash
    assert tier("smoke", predictor={"next_token": True}).hash == tier("smoke").hash
    assert tier("smoke", **joint, predictor={"next_token": True}).hash != tier("smoke", **joint).hash


def test_equal_contents_of_another_kind_have_another_address():
    @dataclasses.dataclass(frozen=True)
    class A:
        x: int = 1

    @dataclasses.dataclass(frozen=True)
    class B:
        x: int = 1

    assert stable_hash(A()) != stable_hash(B()) and stable_hash(A()) == stable_hash(A(1))


# --- the reference's recipe (METHOD.md) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_reference_recipe(name):
    run = tier(name)
    t = run.train
    assert (t.lr, t.beta1, t.beta2, t.weight_decay, t.grad_clip, t.dtype) == (3e-4, 0.9, 0.95, 0.1, 1.0, "bfloat16")
    assert t.steps * t.batch_size * run.model.context == 24_576_000  # "25M tokens: 6000 x 8 x 512"
    assert (run.data.corpus, run.data.tokenizer, run.data.shuffle_buffer, run.model.vocab_size) == ("fineweb-edu", "gpt2", 1000, 50257)
    assert (run.objective.balance, run.objective.target, run.objective.gradient, run.objective.ramp_end) == (0.01, "topk", "input", 0.0)
    assert run.predictor == PredictorConfig(kind="linear", horizons=(1, 2, 4))


@pytest.mark.parametrize("name, shape", [("b", (384, 8, 6, 8, 2)), ("a", (512, 12, 8, 16, 2))])
def test_the_reference_shapes(name, shape):
    m: ModelConfig = TIERS[name].model
    assert (m.hidden_size, m.num_layers, m.num_heads, m.num_experts, m.top_k) == shape


@pytest.mark.parametrize(
    "section, change, said",
    [
        ("train", {"device": "cpu:foo"}, "device='cpu:foo' is unknown"),
        ("train", {"seed": 10**30}, "must lie in"),
        ("train", {"lr": float("inf")}, "must be positive and finite"),
        ("objective", {"lambda_pred": float("inf")}, "and finite"),
        ("data", {"order_seed": -1}, "order_seed=-1 must be at least 0"),
        ("data", {"heldout_tokens": 63}, "heldout_tokens=63 must be at least one context of 64 tokens"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(section, change, said):
    with pytest.raises(ConfigError, match=said):
        tier("smoke", **{section: change})


@pytest.mark.parametrize("section, change", [("train", {"seed": 10**300}), ("train", {"steps": 10**300}), ("train", {"steps": "9" * 300}), ("train", {"device": "x" * 300}), ("objective", {"lambda_pred": -1e300}),
                                             ("predictor", {"kind": "x" * 300}), ("predictor", {"horizons": [10**300]})])  # fmt: skip
def test_a_refused_value_is_told_in_short(section, change):
    with pytest.raises(ConfigError) as caught:
        tier("smoke", **{section: change})
    assert len(str(caught.value)) < 250
