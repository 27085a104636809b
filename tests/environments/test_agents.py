"""Agents that call the model over HTTP: real servers, real processes, a scripted policy."""

import asyncio
import http.client
import json
import os
import threading
import time

import numpy as np
import openai
import psutil
import pytest

from grpo_ext.environments.attempt import AttemptLimits, Task
from grpo_ext.environments.composition import EnvironmentSpec, parse_environments
from grpo_ext.environments.hosts import EnvironmentHost
from grpo_ext.environments.loop import Attempts
from grpo_ext.environments.protocol import Conversation, Step
from grpo_ext.environments.rendering import Renderer
from grpo_ext.objective.trajectory import Sample
from support import tiny
from support.processes import PATIENCE

EPISODES = int(os.environ.get("EPISODES", "40"))
EOS, LETTERS = 1, range(3, 29)
LIMITS = AttemptLimits(completion=400, counts_all=True, context=None, ends=frozenset([EOS]))
GO = [{"role": "user", "content": "go"}]


class Random:
    """Says random letters; each attempt has its own stream."""

    version, pending, descriptor = 3, 0, None

    def __init__(self, waits=False, letters=6):
        self.waits, self.letters, self.seen, self.streams = waits, letters, {}, {}

    def anyone(self, here, leaves):
        return here

    def generate(self, asked):
        found = []
        for one in asked:
            g = self.streams.setdefault(one.attempt, np.random.default_rng(one.attempt))
            ids = [*g.integers(LETTERS.start, LETTERS.stop, g.integers(1, self.letters)).tolist(), EOS][: one.limit]
            self.seen.setdefault(one.attempt, []).append((one.context, ids))
            found.append((one, Sample(ids, (-g.random(len(ids))).tolist())))
        return found


@pytest.fixture
def hosts():
    threads = threading.active_count()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    opened = EnvironmentHost(memory_gib=4.0)
    yield opened
    opened.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads


def spec(path, **settings):
    [found], problems = parse_environments([{"path": path, "turn_timeout": PATIENCE, **settings}])
    assert not problems
    return found


def command(script, **settings):
    """A shell script as an agent."""
    kwargs = {"run": ["sh", "-c", script], **settings.pop("kwargs", {})}
    return spec("command", kwargs=kwargs, name="command", **settings)


def run(hosts, todo, engine=None, limits=LIMITS):
    tokenizer, engine = tiny.tokenizer(), engine or Random()

    def parsed(ids, context, tools):
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}

    made = Attempts(engine, hosts, Renderer(tokenizer, {}), parsed, limits).run(todo)
    return [trajectory for trajectory, _ in made], engine


def tasks(given, rows):
    return [Task(given, row, GO, None, seed=i) for i, row in enumerate(rows)]


# Agents that are functions of this process.


async def three_turns(row, client):
    messages = [{"role": "user", "content": "go"}]
    for _ in range(3):
        made = await client.chat.completions.create(model="policy", messages=messages)
        messages += [made.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "on"}]
    return float(len(messages))


def test_an_agent_trains_what_it_was_answered(hosts):
    made, engine = run(hosts, tasks(spec(three_turns), [{}] * 3))
    for number, trajectory in enumerate(made):
        assert trajectory.failure is None
        assert trajectory.reward == 7.0
        assert [(turn.context, turn.sampled) for turn in trajectory.turns] == engine.seen[number]
        assert len(trajectory.turns) == 3
        assert len(trajectory.rows()) == 1
        assert [m["role"] for m in trajectory.messages] == ["assistant", "user", "assistant", "user", "assistant"]
