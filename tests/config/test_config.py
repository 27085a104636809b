"""GRPOExtConfig: TRL's config plus the axes of the loss, checked as a whole."""

import copy
import dataclasses
import math
import string
import typing
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import training_args
from trl import GRPOConfig, TrlParser

from grpo_ext import GRPOExtConfig
from grpo_ext.config import grpo_config, machine
from grpo_ext.config.declarations import RecipeSettings, TrainingSettings
from grpo_ext.config.grpo_config import KWARGS
from grpo_ext.config.launch import planned_processes, planning, world_size
from grpo_ext.config.setting import APART, VLLM, Change
from grpo_ext.config.settings import _OF_OTHERS, ADAPTED, SETTINGS, change_of, row_of
from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ConfigError
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses
from grpo_ext.objective.ratios import ratios
from grpo_ext.recipe.parts import PARTS, all_keys
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.catalogue import rewards

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
STOCK = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}


def config(**settings) -> GRPOExtConfig:
    return GRPOExtConfig(**CPU, **settings)


def problems(**settings) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config(**settings)
    return [str(problem) for problem in error.value.problems]


# The row, the recipe, TRL's defaults.


@pytest.mark.parametrize(
    ("settings", "axis", "value"),
    [
        ({"importance_sampling_level": "sequence"}, "ratio", "sequence"),
        ({"importance_sampling_level": "product", "loss_aggregation": "seq-mean-token-mean"}, "ratio", "product"),
        ({"advantage_estimator": "loo"}, "advantage", "loo"),
        ({"scale_rewards": "batch"}, "advantage", "batch"),
        ({"scale_rewards": False}, "advantage", "none"),
        ({"loss_type": "dr_grpo", "scale_rewards": True}, "advantage", "group"),
        ({"advantage_estimator": "beta", "advantage_kwargs": {"window": 4}}, "advantage_kwargs", {"window": 4}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "combination", "normalize_then_sum"),
        ({"loss_aggregation": "token-mean"}, "aggregation", "token-mean"),
        ({"beta": 0.1, "kl_estimator": "k2"}, "kl", "k2"),
        ({"beta": 0.1, "use_bias_correction_kl": True}, "kl", "r_k3"),
        ({"loss_type": "rloo", "beta": 0.1, "use_bias_correction_kl": False}, "kl", "k3"),
        ({"beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}, "kl_placement", "reward"),
        ({"missing_rewards": "zero"}, "missing_rewards", "zero"),
    ],
)
def test_an_explicit_setting_beats_the_row(settings, axis, value):
    assert getattr(config(**({"loss_type": "grpo"} | settings)).objective, axis) == value


@pytest.mark.parametrize("name", [n for n in losses if losses[n].trl])
def test_loss_defaults_trl_gives_trls_own_defaults(name):
    extra = {"cispo": {"epsilon_high": 5.0}, "luspo": {"importance_sampling_level": "sequence"}}.get(name, {})
    objective = config(loss_type=name, loss_defaults="trl", beta=0.1, **extra).objective
    if objective.row.surrogate == "clip":
        low, high = STOCK["epsilon"], STOCK["epsilon_high"] or STOCK["epsilon"]
        assert objective.options == {"epsilon_low": low, "epsilon_high": high, "delta": STOCK["delta"]}
    assert objective.advantage == STOCK["scale_rewards"]
    assert not objective.advantage_kwargs
    assert objective.ratio == extra.get("importance_sampling_level", STOCK["importance_sampling_level"])
    assert objective.kl == {True: "r_k3", False: "k3"}[STOCK["use_bias_correction_kl"]]
    assert objective.combination == STOCK["multi_objective_aggregation"]
    assert (objective.kl_placement, objective.missing_rewards) == ("loss", "zero")
    settled = config(loss_type=name, loss_defaults="trl", **extra)
    assert (settled.dropout_disabled, settled.exact_denominators) == (STOCK["disable_dropout"], False)


def test_dropout_is_off_and_denominators_are_exact_by_default():
    assert (config().dropout_disabled, config().exact_denominators) == (True, True)
    assert config(disable_dropout=False).dropout_disabled is False


def test_the_objective_is_computed_once_and_never_stale():
    settled = config(loss_type="grpo")
    first = settled.objective
    assert settled.objective is first
    settled.beta = 0.1
    assert settled.objective.beta == 0.1
    assert dataclasses.replace(settled, beta=0.2, generation_batch_size=None).objective.beta == 0.2
    with temporarily(settled, beta=0.3):
        assert settled.objective.beta == 0.3
    assert copy.copy(settled).objective == settled.objective == dataclasses.replace(first, beta=0.1)


# Copies.


def fields_of(settled: GRPOExtConfig) -> dict:
    return {f.name: getattr(settled, f.name) for f in dataclasses.fields(settled) if f.init}


@pytest.mark.parametrize(("first", "second"), [("gspo", "dapo"), ("beta_bnpo", "grpo"), ("minimind", "deepseek_v3")])
def test_a_copy_with_another_loss_inherits_nothing_of_the_first_row(first, second):
    settled = config(
        loss_type=first, gradient_accumulation_steps=2, scale_rewards="group" if first == "gspo" else None
    )
    copy = GRPOExtConfig(**fields_of(settled) | {"loss_type": second, "scale_rewards": None})
    assert copy.objective == config(loss_type=second).objective
    again = dataclasses.replace(settled)
    assert again.objective == settled.objective
    assert (again.generation_batch_size, again.steps_per_generation) == (16, 2)


def test_a_copy_with_another_batch_size_is_not_silently_the_old_one():
    (problem,) = [
        p for p in _problems_of_copy(config(), per_device_train_batch_size=16) if "generation_batch_size=8" in p
    ]
    assert "16 x 1 x 1 = 16" in problem
    fresh = {"generation_batch_size": None, "steps_per_generation": None}
    assert dataclasses.replace(config(), per_device_train_batch_size=16, **fresh).generation_batch_size == 16


def _problems_of_copy(settled: GRPOExtConfig, **changes) -> list[str]:
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(settled, **changes)
    return [str(problem) for problem in error.value.problems]


# Fields.

NOW_AS_THE_ROW_SAYS = {
    *("importance_sampling_level", "epsilon", "use_bias_correction_kl", "scale_rewards"),
    *("multi_objective_aggregation", "disable_dropout", "vllm_importance_sampling_mode"),
    "vllm_importance_sampling_clip_max",
}
"""TRL's fields whose default is None here: "as the row says"."""
OURS = {
    *("on_nonfinite", "shared_prefix"),
    *("losses", "skip_zero_advantages", "loss_defaults", "loss_kwargs", "kl_estimator", "kl_placement"),
    *("advantage_estimator", "advantage_kwargs", "missing_rewards", "loss_aggregation"),
    *("loss_aggregation_kwargs", "dynamic_sampling", "dynamic_sampling_max_rounds"),
    *("completion_length_counts", "environment_waves", "rollout_engine", "rollout_device"),
    *("rollout_ahead", "micro_batch_tokens", "vllm_weight_transfer", "vllm_push", "replay_routes"),
    *("vllm_dtype", "sampler_correction", "old_logps", "vllm_engine_kwargs", "rollout_drift", "rollout_drift_action"),
}


def test_every_field_of_trl_is_here_with_its_type_and_default():
    stock_hints, hints = typing.get_type_hints(GRPOConfig), typing.get_type_hints(GRPOExtConfig)
    ours = {f.name: f for f in dataclasses.fields(GRPOExtConfig)}
    differing = set()
    for f in dataclasses.fields(GRPOConfig):
        same_default = (ours[f.name].default, ours[f.name].default_factory) == (f.default, f.default_factory)
        if not same_default or hints[f.name] != stock_hints[f.name]:
            differing.add(f.name)
    further = {
        "logging_nan_inf_filter",
        "num_completions_to_print",
    }  # hides what `on_nonfinite` finds; prints them all
    assert differing == NOW_AS_THE_ROW_SAYS | further
    for name in NOW_AS_THE_ROW_SAYS:
        assert ours[name].default is None
        assert hints[name] == stock_hints[name] | None
    assert set(ours) - set(STOCK) == OURS


def test_every_field_has_a_help_that_argparse_can_print():
    text = TrlParser([GRPOExtConfig]).format_help()
    for name in (*OURS, *NOW_AS_THE_ROW_SAYS):
        assert f"--{name}" in text


def test_a_setting_is_declared_once():
    names = " ".join(_OF_OTHERS).split()
    assert len(names) == len(set(names))
    newer = {"dataloader_multiprocessing_context"}  # than the lowest supported transformers
    assert set(names) <= set(all_keys()) | newer | {"world_size"}
    declared = {f.name for part in (TrainingSettings, RecipeSettings) for f in dataclasses.fields(part)}
    assert declared == SETTINGS.keys() - set(names)
    assert declared.isdisjoint(names)


def test_settings_of_vllm_and_of_lora_wait_for_them():
    fields = [f for part in PARTS for f in dataclasses.fields(part)]
    of_vllm = {f.name for f in fields if f.name.startswith("vllm_")}
    assert of_vllm == {f.name for f in fields if f.name in of_vllm and {*row_of(f).needs} & {*VLLM, *APART}}
    of_lora = {f.name for f in fields if f.name.startswith(("lora_", "use_rslora", "use_dora"))}
    assert of_lora == {f.name for f in fields if row_of(f).needs == ADAPTED}


def test_every_switch_is_a_setting():
    switches = {needed for part in PARTS for f in dataclasses.fields(part) for needed in row_of(f).needs}
    names = {switch.replace(":", " ").split()[0] for needed in switches for switch in needed.split(" or ")}
    assert names <= set(all_keys())


def test_the_table_classifies_changes_of_everything_on_record():
    assert [change_of(name) for name in ("logging_steps", "use_cpu", "max_steps", "world_size", "model_revision")] == [
        *(Change.NOTHING, Change.ROUNDING, Change.LENGTH, Change.SPLIT, Change.MODEL)
    ]
    assert change_of("version.trl") == change_of("rewards.accuracy.timeout") == Change.NOTHING
    assert change_of("beta") == change_of("rewards.accuracy.weight") == change_of("dataset_name") == Change.ANOTHER_RUN


BOUNDED = {name: row.within for name, row in SETTINGS.items() if row.within and name in STOCK.keys() | OURS}


@pytest.mark.parametrize(("name", "value"), zip(BOUNDED, cycle([math.nan, math.inf, -math.inf])))
def test_a_number_that_is_not_finite_is_refused(name, value):
    assert any(problem.startswith(f"{name}={value!r}") for problem in problems(**{name: value}))


@pytest.mark.parametrize("name", sorted(name for name, bounds in BOUNDED.items() if -1 not in bounds))
def test_a_negative_count_is_refused(name):
    assert any(problem.startswith(f"{name}=-1") for problem in problems(**{name: -1}))


# Errors.


def test_a_config_error_lists_all_problems():
    with pytest.raises(ValueError, match="2 problems in the configuration") as error:
        config(temperature=-1.0, kl_placement="somewhere")
    assert isinstance(error.value, ConfigError)
    assert len(error.value.problems) == 2
    assert all(f"  - {problem}" in str(error.value) for problem in error.value.problems)
    with pytest.raises(ConfigError, match="1 problem in"):
        config(temperature=-1.0)


def test_a_refusal_of_transformers_is_a_config_error():
    assert "dataloader_prefetch_factor" in problems(dataloader_prefetch_factor=2)[0]


@pytest.mark.parametrize("field", KWARGS)
def test_options_may_come_as_json_text(field):
    option = {"loss_kwargs": "klip", "advantage_kwargs": "ddoff"}.get(field, "decay")
    assert problems(**{field: f'{{"{option}": 0}}'})[0].startswith(f"{field}.{option}=0")
    assert "not JSON" in problems(**{field: "{klip: 0}"})[0]
    assert "not a mapping" in problems(**{field: "[1]"})[0]
    assert config(advantage_kwargs='{"ddof": 0, "eps": 1e-6}').objective.advantage_kwargs == {"ddof": 0, "eps": 1e-6}


def test_the_processes_of_the_launch_count(monkeypatch):
    settings = {"per_device_train_batch_size": 2, "num_generations": 8, "gradient_accumulation_steps": 2}
    assert "2 x 1 x 2 = 4 completions" in problems(**settings)[0]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert world_size() == 2
    with planned_processes(None):
        assert world_size() == 2
    monkeypatch.delenv("WORLD_SIZE")
    with planned_processes(2):
        assert config(**settings).generation_batch_size == 8
    with planned_processes(4):
        assert config(**settings).generation_batch_size == 16
        assert config(**settings, use_vllm=True, vllm_tensor_parallel_size=2).world_size == 4
    assert planning() is False


def test_a_launch_planned_for_a_gpu_is_not_refused_here(monkeypatch):
    for module in (machine, training_args):
        monkeypatch.setattr(module, "is_torch_bf16_gpu_available", lambda: False)
    gpu = {"report_to": "none", "gradient_checkpointing": False}
    with pytest.raises(ConfigError, match="bf16=True: Your setup doesn't support bf16"):
        GRPOExtConfig(**gpu, bf16=True)
    monkeypatch.setattr(grpo_config, "choose_cpu", lambda config: None)
    with pytest.raises(ConfigError, match=r"bf16=True: Your setup doesn't support bf16.*has fp16: true"):  # by default
        GRPOExtConfig(**gpu)
    with planned_processes(1):
        planned = GRPOExtConfig(**gpu, tf32=True, bf16_full_eval=True)
    assert (planned.bf16, planned.tf32, planned.bf16_full_eval) == (True, True, True)


# Typos.

ALPHABET = string.ascii_lowercase + string.digits + "_"
VOCABULARIES = {
    "keys": all_keys(),
    **{
        registry.kind: list(registry)
        for registry in (losses, estimators, combinations, kl_estimators, aggregations, ratios, rewards)
    },
}


@st.composite
def slips(draw) -> tuple[str, str, list[str]]:
    """A name with one letter wrong, missing or too many; the name; all names."""
    known = draw(st.sampled_from(sorted(VOCABULARIES.values())))
    name = draw(st.sampled_from(known))
    i = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from(ALPHABET))
    slip = draw(
        st.sampled_from([name[:i] + letter + name[i + 1 :], name[:i] + name[i + 1 :], name[:i] + letter + name[i:]])
    )
    return slip, name, known


@settings(max_examples=400, deadline=None, derandomize=True)
@given(slips())
def test_one_wrong_letter_still_finds_the_name(slip):
    typed, name, known = slip
    if typed not in known:
        assert name in did_you_mean(typed, known)


@pytest.mark.parametrize(("name", "cure"), [("rollout_device", "Write cpu"), ("dynamic_sampling", "Write reward")])
def test_a_number_in_place_of_a_name_is_not_to_be_quoted(name, cure):
    with pytest.raises(ConfigError, match=rf"{name}=3: a whole number where text is expected. {cure}"):
        GRPOExtConfig("out", use_cpu=True, bf16=False, **{name: 3})
