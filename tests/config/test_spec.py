"""Mappings in a recipe: each unknown, unfitting or missing key is a problem with its place and a cure."""

import copy
import pickle
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from grpo_ext.config.spec import Spec, WrongType, fits, option_problems
from grpo_ext.errors import ABSENT, ConfigError, DataError, Problem
from grpo_ext.objective.options import Ascending, Within


@dataclass
class Entry:
    name: str
    weight: float = 1.0
    timeout: Annotated[float, Within(above=0.0, because="it is in seconds")] | None = None
    on_error: Literal["none", "zero"] = "none"
    clip: Annotated[list[float], Ascending()] | None = None
    tags: list[str] = field(default_factory=list)


SPEC = Spec.of(Entry, "tags", example="{name: accuracy}", func=str)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("accuracy", "rewards[0]='accuracy': not a mapping. Write {name: accuracy}."),
        ({}, "rewards[0].name: missing. Write {name: accuracy}."),
        ({"name": "a", "wieght": 2.0}, "rewards[0].wieght=2.0: no such key. Did you mean 'weight'?"),
        ({"name": "a", "tags": []}, "rewards[0].tags=[]: no such key."),
        ({"name": "a", "weight": "2"}, "rewards[0].weight='2': text where a number is expected. Write weight: 2."),
        ({"name": "a", "weight": True}, "rewards[0].weight=True: a yes or no where a number is expected."),
        ({"name": "a", "weight": float("nan")}, "rewards[0].weight=nan: not finite. Give a finite number."),
        ({"name": "a", "timeout": 0}, "rewards[0].timeout=0: must be above 0: it is in seconds. Correct it, or leave"),
        (
            {"name": "a", "on_error": "zeros"},
            "rewards[0].on_error='zeros': not one of its values. Did you mean 'zero'",
        ),
        ({"name": "a", "clip": [1.0, 0.0]}, "rewards[0].clip=[1.0, 0.0]: must be [lowest, highest]."),
    ],
)
def test_a_mistake_in_an_entry_is_one_problem(entry, message):
    [problem] = SPEC.list_problems("rewards", [entry])
    assert str(problem).startswith(message)


def test_a_sound_entry_and_unset_keys_are_no_problem():
    sound = {"name": "a", "weight": 2, "timeout": None, "on_error": "zero", "clip": [0.0, 1.0], "func": "./f.py:f"}
    assert list(SPEC.list_problems("rewards", [sound])) == []
    assert "not a list" in str(next(SPEC.list_problems("rewards", sound)))


def test_options_of_a_function_are_its_keyword_only_parameters():
    def score(rewards: Any, *, depth: int, scale: Annotated[float, Within(least=0.0, most=1.0)] = 0.5) -> None: ...

    found = {problem.field: problem for problem in option_problems("kwargs", {"scale": 2.0, "rewards": 1}, score)}
    assert found["kwargs.scale"].reason == "must be from 0 to 1"
    assert found["kwargs.rewards"].reason == "score has no such option"
    assert found["kwargs.depth"].value is ABSENT
    [wrong] = option_problems("kwargs", {"depth": 0.5}, score)
    assert isinstance(wrong, WrongType)


def test_a_message_has_value_others_reason_and_cure_but_no_secret():
    problem = Problem("hub_token", "hf_" + 20 * "a", "it is refused", "Log in.", {"push_to_hub": True})
    assert str(problem) == "hub_token='***' with push_to_hub=True: it is refused. Log in."
    assert str(Problem("datasets", ABSENT, "none is given", "")) == "datasets: none is given."
    assert len({problem, problem}) == 1
    idle = Problem("hub_token", ABSENT, "without push_to_hub: true this has no effect", "")
    assert str(idle) == "hub_token: without push_to_hub: true this has no effect."


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_problems_survive_a_copy_and_the_way_to_another_process(kind):
    error = kind(
        [Problem("datasets", ABSENT, "none is given", "Give one."), WrongType("beta", "x", "text", "Write 0.")]
    )
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert (str(other), other.problems) == (str(error), error.problems)
        assert other.problems[0].value is ABSENT


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (bool | None, True),
        (object | None, True),
        (Literal[True, "auto"] | None, True),
        (Annotated[bool, "doc"] | None, True),
        (Annotated[int, Within(least=0.0)] | None, False),
        (float, False),
        (dict[str, bool], False),
        (list[bool] | None, False),
    ],
)
def test_a_bool_is_no_number(hint, expected):
    assert fits(True, hint) is expected
