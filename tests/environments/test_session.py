"""Sessions: TRL's protocol and ours, their tools, invalid results; the packaged environments."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import Mock

import numpy as np
import pytest

from grpo_ext.environments.catalogue import environments
from grpo_ext.environments.composition import parse_environments
from grpo_ext.environments.observations import LONGEST, opened, stepped
from grpo_ext.environments.protocol import Conversation, Step
from grpo_ext.environments.session import InvalidResult, Session, encoded
from grpo_ext.environments.tools import methods_of, schemas
from support import worlds


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def stepped_with(session, *calls):
    return session.answer(("step", {"role": "assistant", "content": "", "tool_calls": list(calls)}))


def session(make, *functions):
    return Session(make, functions, seed=5)


def test_tools_of_trls_protocol_are_called_as_by_trl():
    play = session(worlds.Counter, worlds.add)
    assert play.answer(("reset", {"start": 2, "solution": "7"})) == {"opening": " from 2"}
    answer = stepped_with(play, call("add", number=3), call("look"), call("add", number=-1), call("fly"))
    assert [m["content"] for m in answer["observation"]] == [
        "5",
        "it is 5",
        "{'error': 'only upwards'}",
        "{'error': \"there is no tool 'fly', only add, look\"}",
    ]
    assert [m["role"] for m in answer["observation"]] == ["tool"] * 4
    assert (answer["calls"], answer["refused"], answer["done"]) == (4, 2, False)
    assert stepped_with(play)["done"] is True
    assert play.answer(("finish", None)) == {"reward": 5.0}


class Shows:
    """Its tool returns, or raises, what it is made with."""

    def __init__(self, value):
        self.value = value

    def reset(self, **row):
        pass

    def show(self):
        """Show."""
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@dataclass
class Ran:
    """What a tool that runs programs may return."""

    out: str


URL = {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}
TEXTS = [{"type": "text", "text": "an "}, {"type": "text", "text": "owl"}]


def shown(value):
    play = session(lambda: Shows(value))
    play.answer(("reset", {}))
    return stepped_with(play, call("show"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (TEXTS, "an owl"),
        ([1, 2], "[1, 2]"),
        ([], "[]"),
        ([{"type": "dog"}], "[{'type': 'dog'}]"),
        ("<a at 0x7f12>", "<a at 0x7f12>"),
        ([{"type": "text", "text": "<a at 0x7f12>"}], "<a at 0x7f12>"),
        ({"out": ["<a at 0x7f12>"]}, "{'out': ['<a at 0x7f12>']}"),
        (Ran("<a at 0x7f12>"), "Ran(out='<a at 0x7f12>')"),
        (ValueError("no <A object at 0x7f12aB>"), "{'error': 'no <A object>'}"),
    ],
)
def test_a_tools_result_becomes_text(value, text):
    assert [m["content"] for m in shown(value)["observation"]] == [text]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([*TEXTS, URL], "tool 'show' returned content of type 'image_url', and environments carry text and images"),
        ([{"now": object()}], "shows an address in memory"),
        ({"then": (1, {print: min, len: lambda: 0})}, "shows an address in memory"),
        ((i for i in "ab"), "shows an address in memory"),
        (object(), "Return text, or give the object's class a method __str__"),
    ],
)
def test_a_tools_result_without_text_fails_the_episode(value, reason):
    kind, found = shown(value)["failed"]
    assert kind == "garbage"
    assert reason in found


def test_schemas_are_of_functions_and_methods_without_their_self():
    [function, method, other] = schemas(worlds.Counter, [worlds.add])
    assert [s["function"]["name"] for s in (function, method, other)] == ["add", "add", "look"]
    assert method["function"]["parameters"]["required"] == ["number"]


class Returns(Conversation):
    def __init__(self, value):
        self.value = value

    def step(self, message):
        return self.value


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (Step("on"), (["on"], None, False)),
        (("on", 0.5), (["on"], 0.5, False)),
        ((None, 1, True), ([], 1.0, True)),
        (Step([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]), (["a", "b"], None, False)),
    ],
)
def test_a_step_is_read(value, read):
    step = stepped({**_answered(value), "calls": 10**400, "refused": "7"})
    assert step[-2:] == (0, 0)  # absurd counts are ignored
    assert ([m["content"] for m in step.observation], step.reward, step.done) == read


def _answered(value):
    play = session(lambda: Returns(value))
    play.answer(("reset", {}))
    return play.answer(("step", {}))


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()])
def test_any_exception_is_a_failure_of_the_environment(error, monkeypatch):
    monkeypatch.setattr(Returns, "step", Mock(side_effect=error))
    assert _answered(None)["failed"][0] == "raised"


@pytest.mark.parametrize("value", [b"bytes", b"12", object(), {1, 2}, np.ones(3)])
def test_a_value_that_json_cannot_hold_is_garbage(value):
    kind, reason = json.loads(encoded(_answered(Step(value))))["failed"]
    assert kind == "garbage"
    assert "Return text, or [{'role': ..., 'content': ...}]" in reason or isinstance(value, np.ndarray)
    assert json.loads(encoded(_answered(Step("on", np.float32(0.5)))))["reward"] == 0.5


@pytest.mark.parametrize("value", [7, None, (), (1, 2, 3, 4, 5), "text"])
def test_a_result_that_is_not_a_step_is_garbage(value):
    kind, reason = _answered(value)["failed"]
    assert kind == "garbage"
    assert "Return Step(observation, reward, done)" in reason


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"observation": None, "done": False}, "nothing to answer"),
        ({"observation": [*TEXTS, URL]}, "content of type 'image_url', and environments carry text and images"),
        ({"observation": [{"role": "user", "content": [URL]}]}, "carry text and images"),
        ({"observation": 7}, "neither text nor messages"),
        ({"observation": [{"role": "user"}]}, "neither text nor messages"),
        ({"observation": "x" * (LONGEST + 1)}, "characters"),
        ({"observation": "a", "reward": float("nan")}, "a finite number"),
        ({"observation": "a", "reward": "much"}, "a finite number"),
        ({"observation": "a", "reward": 10**400}, "a finite number"),
        ({"observation": "a", "reward": -1e39}, "a finite number"),
    ],
)
def test_invalid_answers_are_refused(answer, message):
    with pytest.raises(InvalidResult, match=message):
        stepped(answer)


@pytest.mark.parametrize(
    ("opening", "contents"),
    [
        (None, ["s", "go"]),
        ("!", ["s", "go!"]),
        (TEXTS, ["s", "goan owl"]),
        ([{"role": "user", "content": "new"}], ["new"]),
        ([{"role": "user", "content": TEXTS}], ["an owl"]),
    ],
)
def test_a_conversation_is_opened(opening, contents):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    assert [m["content"] for m in opened(prompt, {"opening": opening}, list)] == contents


@pytest.mark.parametrize("opening", [None, "!"])
def test_a_prompt_of_parts_takes_text_and_fails_the_episode_with_a_url(opening):
    [message] = opened([{"role": "user", "content": TEXTS}], {"opening": opening}, list)
    assert message["content"] == [*TEXTS, *([{"type": "text", "text": "!"}] if opening else [])]
    with pytest.raises(InvalidResult, match="the prompt has content of type 'image_url'"):
        opened([{"role": "user", "content": [*TEXTS, URL]}], {"opening": opening}, list)


# The packaged ones.


def test_packaged_classes_of_tools_are_named_in_a_recipe():
    specs, problems = parse_environments(["calculator", "python"])
    assert problems == []
    assert [list(methods_of(spec.target)) for spec in specs] == [["calculate"], ["python"]]


@pytest.mark.parametrize(
    ("expression", "result"),
    [("(3 + 4) * 2", "14"), ("7 / 2", "3.5"), ("2^10", "1024"), ("-7 // 2", "-4"), ("6/3", "2")]
    + [(text, None) for text in ("9**9**9", "10**16", "__import__('os')", "1/0", "1" * 300, "(-1)**.5", "a+1")],
)
def test_the_calculator_computes_or_refuses(expression, result):
    with pytest.raises((ValueError, ZeroDivisionError)) if result is None else nullcontext():
        assert environments["calculator"]().calculate(expression) == result


def test_retry_pays_the_last_attempt():
    play = environments["retry"](reward="accuracy", attempts=3, discount=0.5, feedback="again")
    play.reset({"prompt": "1+1", "solution": "2"})
    steps = [play.step({"role": "assistant", "content": f"\\boxed{{{x}}}"}) for x in (3, 2)]
    assert steps == [Step("again", None, False), Step(None, 0.5, True)]


def test_retry_refuses_a_reward_of_token_counts_and_finds_a_file_beside_the_recipe(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [1.0] * len(completions)")
    entries = [{"name": "retry", "kwargs": {"reward": reward}} for reward in ("cosine_length", "./mine.py:f")]
    _, problems = parse_environments(entries[:1], tmp_path)
    assert "it counts tokens" in str(problems[0])
    [spec], problems = parse_environments(entries[1:], tmp_path)
    assert problems == []
    assert spec.kwargs["reward"] == f"{tmp_path / 'mine.py'}:f"


def test_guess_draws_from_the_prompts_seed_where_the_row_has_no_number():
    games = [environments["guess"](high=1000) for _ in range(3)]
    for seed, game in zip((1, 1, 2), games, strict=True):
        game.seed = seed
        game.reset({})
    assert games[0].secret == games[1].secret != games[2].secret
    assert games[0].step({"role": "assistant", "content": "well"}) == Step("no number", -0.0, False)


@pytest.mark.parametrize(
    ("program", "said"),
    [("print(6*7)", "42"), ("1/0", "ZeroDivisionError"), ("while 1: pass", "[stopped: time]"), ("x = 1", "[noth")],
)
def test_python_runs_programs(program, said):
    assert said in environments["python"](timeout=2.0, min_protection="network").python(program)
