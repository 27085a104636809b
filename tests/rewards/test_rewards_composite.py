"""What `reward_funcs` accepts, refuses and turns into callables for TRL."""

import asyncio
import inspect
import math

import pytest
from trl.trainer.utils import get_callable_name, is_async_callable

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.composition import RewardSpec, parse_rewards
from grpo_ext.rewards.runtime import Runtime

MODULE = """
import functools

def plain(completions, **kwargs):
    return [1.0] * len(completions)

def scaled(completions, *, scale: float, names: list[str] | None = None, count: int = 1, log_extra=None, **kwargs):
    return [scale * len(c) for c in completions]

async def later(completions, *, value: float = 2.0, **kwargs):
    return [value] * len(completions)

def no_columns(completions):
    return [0.0] * len(completions)

def untyped(completions, *, anything, **kwargs):
    return [anything]

def hinted(completions, *, value: "Missing" = 0, **kwargs):
    return [value]

class Callable_:
    def __call__(self, completions, **kwargs):
        return [3.0] * len(completions)

class AsyncCallable:
    async def __call__(self, completions, **kwargs):
        return [4.0] * len(completions)

instance = Callable_()
async_instance = AsyncCallable()
partial = functools.partial(scaled, scale=2.0)
number = 3
"""


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_reward_lib.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_reward_lib"


def problems_of(*entries, **options):
    specs, problems = parse_rewards(list(entries), **options)
    assert len(specs) < len(entries) or problems[0].field.startswith("reward_weights") or "log name" in str(problems)
    return problems


# What is accepted


def test_names_paths_and_mappings(my_rewards):
    specs, problems = parse_rewards(
        [
            "tags",
            {"name": "format", "weight": 0.5, "kwargs": {"style": "think"}},
            {"name": "short", "func": "soft_overlong", "kwargs": {"max_length": 10, "buffer": 4}},
            "my_reward_lib.plain",
            {"name": "my_reward_lib:scaled", "kwargs": {"scale": 2, "names": ["a"]}, "weight": 3},
            {"name": "late", "func": "my_reward_lib:later", "kwargs": None},
            "org/reward-model",
            {"name": "./folder/model/", "weight": 2.0},
        ]
    )
    assert problems == []
    assert specs == [
        RewardSpec("tags", "tags"),
        RewardSpec("format", "format", 0.5, {"style": "think"}),
        RewardSpec("short", "soft_overlong", 1.0, {"max_length": 10, "buffer": 4}),
        RewardSpec("plain", "my_reward_lib.plain"),
        RewardSpec("scaled", "my_reward_lib:scaled", 3.0, {"scale": 2, "names": ["a"]}),
        RewardSpec("late", "my_reward_lib:later"),
        RewardSpec("reward-model", "org/reward-model"),
        RewardSpec("model", "./folder/model/", 2.0),
    ]


def test_every_registered_name_without_required_options_parses():
    options = {name: inspect.signature(function).parameters.values() for name, function in rewards.items()}
    names = [
        n for n, ps in options.items() if all(p.kind is not p.KEYWORD_ONLY or p.default is not p.empty for p in ps)
    ]
    specs, problems = parse_rewards(names)
    assert problems == []
    assert [spec.function for spec in specs] == names


def test_reward_weights_replace_the_weights():
    specs, problems = parse_rewards(["tags", "format"], reward_weights=[0.25, -1])
    assert problems == []
    assert [spec.weight for spec in specs] == [0.25, -1.0]


def test_callable_objects_and_partials_get_trls_names(my_rewards):
    specs, problems = parse_rewards([f"{my_rewards}:instance", f"{my_rewards}:partial"])
    assert problems == []
    assert [spec.name for spec in specs] == ["Callable_", "scaled"]


# What is refused: each problem has the value, the reason, the cure


@pytest.mark.parametrize(
    ("entry", "field", "words"),
    [
        ("acuracy", "", ["unknown reward 'acuracy'", "Did you mean 'accuracy'", "package.module:function"]),
        ("no_such_lib.fn", "", ["cannot import 'no_such_lib'"]),
        ("my_reward_lib.plane", "", ["no 'plane'", "Did you mean 'plain'"]),
        ("my_reward_lib.number", "", ["it is a int, not a function", "Name a callable"]),
        ("my_reward_lib.no_columns", "", ["does not take **kwargs", "Add **kwargs"]),
        ("soft_overlong", ".kwargs.buffer", ["soft_overlong needs it"]),
        ("", "", ["does not name a reward"]),
        (3, "", ["neither a name nor a mapping"]),
        ({}, "", ["does not name a reward"]),
        ({"name": 3}, "", ["does not name a reward"]),
        ({"name": "tags", "wieght": 1}, ".wieght", ["no such key", "Did you mean 'weight'"]),
        ({"name": "tags", "newlines": True}, ".newlines", ["option of the function", "kwargs: {newlines: True}"]),
        *(({"name": "tags", "weight": weight}, ".weight", []) for weight in ("1", True, math.nan, math.inf)),
        ({"name": "tags", "kwargs": ["newlines"]}, ".kwargs", ["where a mapping is expected"]),
        ({"name": "tags", "kwargs": {1: 2}}, ".kwargs", ["where a mapping is expected"]),
        ({"name": "tags", "kwargs": {"newline": True}}, ".kwargs.newline", ["no such option", "mean 'newlines'"]),
        ({"name": "accuracy", "kwargs": {"solution": "x"}}, ".kwargs.solution", ["max_length, read"]),
        ({"name": "reasoning_steps", "kwargs": {"n": 3}}, ".kwargs.n", ["It takes none"]),
        ({"name": "my_reward_lib.scaled", "kwargs": {"scale": 1, "log_extra": 1}}, ".kwargs.log_extra", []),
        ({"name": "tags", "kwargs": {"newlines": "yes"}}, ".kwargs.newlines", ["text where true or false"]),
        ({"name": "repetition", "kwargs": {"n": 2.5}}, ".kwargs.n", ["a whole number is expected"]),
        ({"name": "repetition", "kwargs": {"n": True}}, ".kwargs.n", ["a whole number is expected"]),
        ({"name": "repetition", "kwargs": {"max_penalty": "1e-3"}}, ".kwargs.max_penalty", ["text where a number"]),
        ({"name": "my_reward_lib.scaled", "kwargs": {"scale": 1, "names": [1]}}, ".kwargs.names", ["list of names"]),
        ({"name": "format", "kwargs": {"style": "boxes"}}, ".kwargs.style", ["not a format", "Did you mean 'boxed'"]),
        ({"name": "soft_overlong", "kwargs": {"max_length": 5, "buffer": 6}}, ".kwargs.buffer", ["<= buffer <= 5"]),
        ({"name": "minimind", "kwargs": {"scorer": "no_such_lib:f"}}, ".kwargs", ["cannot import 'no_such_lib'"]),
        ({"name": "mine", "func": "org/model"}, ".name", ["under its own id"]),
        ({"name": "org/model", "kwargs": {"a": 1}}, ".kwargs", ["Remove kwargs"]),
        ({"name": "org/model", "scale": 2.0}, ".scale", ["Use the reward reward_model"]),
        ({"name": "tags", "weight_schedule": "linear"}, ".weight_schedule", ["Write {kind: linear, to: 0.0}"]),
        ({"name": "tags", "weight_schedule": {"kind": "cosin", "to": 0}}, ".weight_schedule.kind", ["mean 'cosine'"]),
        ({"name": "tags", "weight_schedule": {"kind": "linear"}}, ".weight_schedule.to", ["weight_schedule.to=None"]),
        ({"name": "tags", "weight_schedule": [[5, 1.0], [2, 1.0]]}, ".weight_schedule", ["do not rise"]),
        ({"name": "tags", "clip": [3, -3]}, ".clip", []),
        ({"name": "tags", "scale": 0}, ".scale", []),
        ({"name": "tags", "timeout": -1}, ".timeout", []),
        ({"name": "tags", "retries": 1.5}, ".retries", []),
        ({"name": "tags", "on_error": "nil"}, ".on_error", []),
        ({"name": "tags", "isolate": False, "timeout": 3}, ".timeout", ["a call cannot be stopped"]),
        ({"name": "tags", "independent": "yes"}, ".independent", ["text where true or false"]),
        ({"name": "tags", "time_out": 3}, ".time_out", ["Did you mean 'timeout'"]),
    ],
)
def test_a_mistake_in_an_entry_is_a_problem_with_field_reason_and_cure(my_rewards, entry, field, words):
    problems = problems_of(entry)
    assert f"reward_funcs[0]{field}" in [problem.field for problem in problems]
    text = " ".join(map(str, problems))
    assert all(word in text for word in words), text


def test_all_problems_come_together():
    specs, problems = parse_rewards(
        ["tags", "acuracy", {"name": "repetition", "weight": "x", "kwargs": {"n": "3", "m": 1}, "wait": 0}, "tags"],
        reward_weights=[1.0, "a"],
    )
    assert [spec.name for spec in specs] == ["tags", "tags"]
    expected = [
        "reward_funcs[1]",
        *(f"reward_funcs[2].{key}" for key in ("weight", "wait", "kwargs.n", "kwargs.m")),
        "reward_funcs",
        *("reward_weights", "reward_weights[1]", "reward_weights"),
    ]
    assert [problem.field for problem in problems] == expected


@pytest.mark.parametrize(
    ("entries", "reason"),
    [(None, "no source of rewards"), ([], "no source of rewards")]
    + [(entries, "not a list") for entries in ("tags", {"name": "tags"}, 3, iter(["tags"]))],
)
def test_reward_funcs_must_be_a_list_with_entries(entries, reason):
    specs, [problem] = parse_rewards(entries)
    assert (specs, problem.field, problem.reason) == ([], "reward_funcs", reason)


def test_repeated_log_names(my_rewards):
    [problem] = problems_of("tags", {"name": "tags", "func": "format"})
    assert "2 entries have the log name 'tags'" in str(problem)
    assert "func: format" in str(problem)
    assert "log name 'model'" in str(problems_of("a/model", "b/model")[0])


@pytest.mark.parametrize(
    ("entries", "weights", "words"),
    [
        (["tags"], [1.0, 2.0], "reward_weights=[1.0, 2.0]: 2 weights for 1 rewards"),
        (["tags"], [float("nan")], "reward_weights[0]=nan: not a finite number"),
        (["tags"], [10**400], "not a finite number"),
        (["tags"], [True], "reward_weights[0]=True"),
        (["tags"], 1.0, "reward_weights=1.0: not a list"),
        (["tags"], "1", "reward_weights='1': not a list"),
        ([{"name": "tags", "weight": 1.0}], [1.0], "entries of reward_funcs give weights too"),
    ],
)
def test_refused_reward_weights(entries, weights, words):
    [problem] = problems_of(*entries, reward_weights=weights)
    assert words in str(problem)


def test_hints_that_cannot_be_resolved_are_not_checked(my_rewards):
    entries = [f"{my_rewards}:hinted", {"name": f"{my_rewards}:untyped", "kwargs": {"anything": object}}]
    assert parse_rewards([{"name": entries[0], "kwargs": {"value": "x"}}, entries[1]])[1] == []


# What TRL gets


def build(*specs):
    return Runtime(specs, workers=0).functions


def test_built_rewards_have_log_names_options_and_model_ids(my_rewards):
    entries = [{"name": "length", "func": f"{my_rewards}:scaled", "kwargs": {"scale": 0.5}}, "./rm/model", "tags"]
    length, model, tags = build(*parse_rewards(entries)[0])
    assert (length.__name__, model, tags.__name__) == ("length", "./rm/model", "tags")
    assert length(prompts=["", ""], completions=["abcd", ""], log_extra=print, trainer_state=None) == [2.0, 0.0]


@pytest.mark.parametrize(("name", "value"), [("later", 5.0), ("async_instance", 4.0), ("plain", 1.0)])
def test_async_functions_stay_async(my_rewards, name, value):
    kwargs = {"value": 5.0} if name == "later" else {}
    [component] = build(RewardSpec("late", f"{my_rewards}:{name}", kwargs=kwargs))
    assert (get_callable_name(component), is_async_callable(component)) == ("late", name != "plain")
    given = component(prompts=[""], completions=["a"])
    assert (given if name == "plain" else asyncio.run(given)) == [value]


def test_the_recipes_options_win_over_columns_of_the_same_name():
    [reward] = build(RewardSpec("repetition", "repetition", kwargs={"n": 1}))
    assert reward(completions=["a a"], n=[7]) == [-0.5]


def test_a_column_never_becomes_an_option_silently():
    [reward] = build(RewardSpec("tags", "tags"))
    with pytest.raises(ValueError, match="dataset column 'newlines': it has the name of an option of reward 'tags'"):
        reward(completions=["<think>"], newlines=[True])
