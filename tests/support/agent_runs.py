"""A loop in which agents meet a policy that says random letters."""

import numpy as np

from grpo_ext.environments.composition import EnvironmentSpec, parse_environments
from grpo_ext.environments.episode import EpisodeLimits, Task
from grpo_ext.environments.loop import EpisodeLoop
from grpo_ext.environments.rendering import Renderer
from grpo_ext.objective.trajectory import Sample
from support import agents, tiny
from support.agents import GO
from support.processes import PATIENCE

EOS, LETTERS = 1, range(3, 29)
LIMITS = EpisodeLimits(completion=400, counts_all=True, context=None, ends=frozenset([EOS]))


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


def spec(path, **settings) -> EnvironmentSpec:
    [found], problems = parse_environments([{"path": path, "turn_timeout": PATIENCE, **settings}])
    assert not problems
    return found


def tasks(given, rows):
    return [Task(given, row, GO, None, seed=i) for i, row in enumerate(rows)]


def run(hosts, todo, engine=None, limits=LIMITS):
    tokenizer, engine = tiny.tokenizer(), engine or Random()

    def parsed(ids, context, tools):
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}

    made = EpisodeLoop(engine, hosts, Renderer(tokenizer, {}), parsed, limits).run(todo)
    return [trajectory for trajectory, _ in made], engine


def faulty(faults) -> list[Task]:
    """A task of `agents.faulty` for each fault, or None; those that hang have an environment whose time is soon up."""
    path, seconds = f"{agents.__file__}:faulty", {True: 3.0, False: PATIENCE}
    specs = {hangs: spec(path, name=f"faulty {hangs}", turn_timeout=most) for hangs, most in seconds.items()}
    return [Task(specs[fault == "hangs"], {"fault": fault}, GO, None, seed=0) for fault in faults]
