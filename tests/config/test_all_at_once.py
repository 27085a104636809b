"""All mistakes at once: a broken field hides exactly those relations whose truth depends on it."""

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from grpo_ext import GRPOExtConfig
from grpo_ext.config import checks
from grpo_ext.config.rules import BrokenFieldRead, as_far_as_sound, is_broken, without
from grpo_ext.recipe.files import read_yaml

FIELDS = {f.name: f for f in dataclasses.fields(GRPOExtConfig)}
SOUND = {
    "loss_type": "grpo",
    "num_generations": 4,
    "max_completion_length": 64,
    "per_device_train_batch_size": 8,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
}
VALUES = {
    "per_device_train_batch_size": (8, 16),
    "num_generations": (4, 8),
    "learning_rate": (1e-6, 1e-5),
    "temperature": (1.0, 0.7),
    "num_completions_to_print": (0, 2),
    "max_completion_length": (64, 128),
    "epsilon": (None, 0.1),
    "eval_strategy": ("no", "steps"),
    "lr_scheduler_kwargs": (None, {}),
    "vllm_mode": ("server", "colocate"),
}
"""Fields that are broken, and two sound values of each."""
SIZES = ("num_generations=", "generation_batch_size=", "steps_per_generation=")
"""Relations that are one matter: the sizes that would work are computed from all of them."""


def given(**values) -> GRPOExtConfig:
    config = object.__new__(GRPOExtConfig)
    for name, f in FIELDS.items():
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        setattr(config, name, values.get(name, SOUND.get(name, default)))
    return config


def related(config: GRPOExtConfig) -> set[str]:
    return {str(problem) for rule in checks.RELATIONS for problem in as_far_as_sound(rule(config))}


@cache
def relations() -> dict[str, dict]:
    """Recipes in which only fields of the config disagree with each other."""
    cases = read_yaml(Path(__file__).parents[1] / "recipe" / "mistakes.yaml")["settings"]
    recipes = {name: case["recipe"] for name, case in cases.items() if "key" in case and "recipe" in case}
    configs = {name: values for name, values in recipes.items() if values.keys() <= FIELDS.keys()}
    return {name: values for name, values in configs.items() if not checks.field_problems(given(**values))}


@pytest.mark.parametrize(
    "field", [pytest.param(field, marks=[pytest.mark.slow] * (field != "num_generations")) for field in VALUES]
)
def test_a_broken_field_hides_what_depends_on_it_and_nothing_else(field):
    seen = 0
    for name, values in relations().items():
        if field in values:
            continue
        one, other = (related(given(**values | {field: value})) for value in VALUES[field])
        beside = related(without(given(**values), [field]))
        whole = {p for p in one & other if not p.startswith(SIZES)}
        assert beside >= whole, (name, "hidden, though it holds for both values")
        assert beside <= one & other, (name, "reported, though it depends on the value")
        seen += bool(beside)
    assert seen > 20


def test_there_are_many_relations_to_look_at():
    assert len(relations()) > 60


LOOKS = {
    **{function.__name__: function for function in (bool, str, repr, len, iter, hash, float, range)},
    "compared": lambda value: value > 1,
    "equal": lambda value: value == "no",
    "multiplied": lambda value: 2 * value,
    "formatted": lambda value: f"{value:g}",
    "of a type": lambda value: isinstance(value, str),
    "in": lambda value: value in ("a",),
    "attribute": lambda value: value.value,
    "item": lambda value: value[0],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_any_look_at_a_broken_value_is_noticed(look):
    broken = vars(without(given(), ["epsilon"]))["epsilon"]
    assert is_broken(broken)
    with pytest.raises(BrokenFieldRead):
        look(broken)
