"""The loop with real environments in real processes and a scripted policy."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import decoders

from grpo_ext import waiting
from grpo_ext.child_processes import FOLDER_PREFIX, LOADING_SECONDS
from grpo_ext.environments import fork_server
from grpo_ext.environments.composition import parse_environments
from grpo_ext.environments.episode import EpisodeLimits, Task
from grpo_ext.environments.hosts import EnvironmentHost
from grpo_ext.environments.loop import EpisodeLoop
from grpo_ext.environments.rendering import Renderer
from grpo_ext.environments.session import EnvironmentFailed
from grpo_ext.errors import SamplerLost
from grpo_ext.objective.trajectory import Sample
from grpo_ext.rollout.turn_engines import _going_on
from support import tiny, worlds
from support.processes import PATIENCE

EOS, LETTERS = 1, range(3, 29)
LIMITS = EpisodeLimits(completion=200, counts_all=True, context=None, ends=frozenset([EOS]))
HERE = Path(worlds.__file__)


class Scripted:
    """A policy whose turns depend on the episode only."""

    version, pending, descriptor = 3, 0, None

    def __init__(self, turn=None, waits=False):
        self.turn, self.waits, self.waves = turn or self._random, waits, []
        self.said = {}

    @staticmethod
    def _random(episode, turn):
        g = np.random.default_rng((episode, turn))
        return [*g.integers(LETTERS.start, LETTERS.stop, g.integers(1, 6)).tolist(), EOS]

    def anyone(self, here, leaves):
        return here

    def generate(self, asked):
        if asked:
            self.waves.append([one.episode for one in asked])
        samples = []
        for one in asked:
            turns = self.said.setdefault(one.episode, [])
            turns.append(self.turn(one.episode, len(turns))[: one.limit])
            samples.append((one, Sample(turns[-1], None)))
        return samples


class Requests(Scripted):
    """The same in threads; a turn takes the `seconds` of its episode."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.threads, self.asked = seconds, ThreadPoolExecutor(8), {}
        self.descriptor, self.told = os.pipe()
        os.set_blocking(self.descriptor, False)

    @property
    def pending(self):
        return len(self.asked)

    def generate(self, asked):
        for one, sample in super().generate(asked):
            future = self.threads.submit(time.sleep, self.seconds[one.episode])
            self.asked[future] = one, sample
            future.add_done_callback(lambda _: os.write(self.told, b"."))
        with suppress(BlockingIOError):
            os.read(self.descriptor, 1)
        return [self.asked.pop(future) for future in list(self.asked) if future.done()]

    def close(self):
        self.threads.shutdown()
        os.close(self.descriptor)
        os.close(self.told)


def spec(name="Faulty", **settings):
    entry = {"path": f"{HERE}:{name}", "turn_timeout": PATIENCE, **settings}
    [found], problems = parse_environments([entry])
    assert not problems
    return found


def tasks(given, rows):
    prompt = [{"role": "user", "content": "go"}]
    return [Task(given, row, prompt, None, seed=i // 2) for i, row in enumerate(rows)]


@pytest.fixture
def hosts():
    before, others = descriptors(), processes()  # of tests before, in this process
    opened = EnvironmentHost(memory_gib=1.0)
    yield opened
    opened.close()
    assert processes() <= others
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", worlds.LITTER]]
    deadline = time.monotonic() + PATIENCE
    while descriptors() > before and time.monotonic() < deadline:  # a thread's end closes with it
        time.sleep(0.05)
    assert descriptors() <= before


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def processes():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def run(hosts, todo, engine=None, limits=LIMITS, tokenizer=None):
    engine = engine or Scripted()
    tokenizer = tokenizer or tiny.tokenizer()

    def parsed(ids, context, tools):
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}

    episodes = EpisodeLoop(engine, hosts, Renderer(tokenizer, {}), parsed, limits)
    return [trajectory for trajectory, _ in episodes.run(todo)], engine


# Faults.


def test_each_fault_fails_its_own_episode_only(hosts):
    faults = [None, *worlds.FAULTS, None]
    sound, _ = run(hosts, tasks(spec(), [{"fault": None}] * len(faults)))
    todo = tasks(spec(), [{"fault": fault} for fault in faults])
    for i in (faults.index("hangs"), faults.index("writes over its line")):
        todo[i] = replace(todo[i], spec=spec(turn_timeout=4.0))
    faulty, _ = run(hosts, todo)
    assert [t.failure and t.failure.partition(":")[0] for t in faulty] == [None, *worlds.FAULTS.values(), None]
    assert [t for t, fault in zip(faulty, faults, strict=True) if fault is None] == [sound[0], sound[-1]]
    assert all(t.reward is None and t.truncated for t in faulty if t.failure)
    assert all(turn.reward is None for t in faulty if t.failure for turn in t.turns)
    assert [len(t.turns) for t in faulty] == [3, 1, *[2] * (len(worlds.FAULTS) - 1), 3]
    assert faulty[1].turns[0].sampled == []


STRIPS = (
    "{% for m in messages %}{{ m['content'][1:] if m['role'] == 'assistant' else m['content'] }}=<eos>{% endfor %}"
)
"""A template that drops what comes first in the model's messages, as others drop its thinking."""


def test_the_state_of_a_turn_is_the_observation_though_a_template_rewrites_the_history(hosts):
    """The policy's words differ, and stand in each context that is rendered from its beginning."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = STRIPS
    done, _ = run(hosts, tasks(spec("Slow"), [{"seconds": [0.0] * 4}] * 2), tokenizer=tokenizer)
    one, other = (trajectory.tree.states for trajectory in done)
    assert [t.sampled for t in done[0].turns] != [t.sampled for t in done[1].turns]
    assert all(len(trajectory.rows()) == 4 for trajectory in done)  # each context was rewritten
    assert one == other
    assert len(set(one)) == 2  # the prompt, then what the environment answers each time
    assert repr("on") in one[1]


class Leaving(Scripted):
    """It is asked whether to go on as an engine of a trainer is."""

    def anyone(self, here, leaves):
        return _going_on([(here, leaves)])


@pytest.mark.slow
def test_an_import_that_hangs_is_named_and_left_on_a_signal(hosts, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(fork_server, "GRACE_SECONDS", 0.2)
    shutdown = waiting.Shutdown()
    timer = threading.Timer(2.0, shutdown.set)
    timer.start()
    with waiting.ended_by(shutdown), pytest.raises(SamplerLost, match="a signal ends the run"):
        run(hosts, tasks(spec("NeverLoaded"), [{}] * 3), Leaving())
    timer.join()
    assert time.monotonic() - shutdown.since < PATIENCE / 4
    assert "environment NeverLoaded, its import and preload: no sign of life for" in caplog.text


@pytest.mark.slow
def test_a_fork_server_that_hangs_fails_the_attempts_of_one_generation(hosts, monkeypatch):
    todo = tasks(spec("Slow"), [{"seconds": [0.0]}] * 40)
    sound, _ = run(hosts, todo)
    [server] = hosts._servers.values()
    server._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # fewer messages than episodes
    [below] = psutil.Process(server._child.process.pid).children()  # that is its warden
    below.suspend()
    monkeypatch.setattr(fork_server, "LOADING_SECONDS", 1.0)
    lost, _ = run(hosts, tasks(spec("Slow", turn_timeout=2.0), [{"seconds": [0.0]}] * 40))
    failures = [t.failure for t in lost]
    assert "died: its fork server hung for 1 s" in failures
    assert all(failures)
    monkeypatch.undo()
    assert run(hosts, todo)[0] == sound


def test_on_error_may_name_a_reward(hosts):
    [lost], _ = run(hosts, tasks(spec(on_error=-1.0), [{"fault": "exits"}]))
    assert (lost.reward, [turn.reward for turn in lost.turns]) == (-1.0, [None, None])
    assert lost.failure == "died: it ended with exit code 3"


def test_each_episode_fails_if_the_class_cannot_be_imported(hosts, tmp_path):
    (tmp_path / "vanishing.py").write_text((HERE).read_text())
    [found], problems = parse_environments([f"{tmp_path}/vanishing.py:Faulty"])
    assert not problems
    (tmp_path / "vanishing.py").write_text("raise RuntimeError('gone')")
    lost, _ = run(hosts, tasks(found, [{"fault": None}] * 2))
    assert all("gone" in t.failure for t in lost)


@pytest.mark.parametrize(
    ("name", "settings", "rows", "failures", "reward"),
    [
        ("Crowded", {}, [{"seconds": [0.0]}] * 3, [None, "died: it closed its end", None], 1.0),
        ("KilledWhileImported", {}, [{}], ["died: it was killed by SIGKILL while it was being imported"], None),
        ("Twin", {}, [{}] * 2, [None] * 2, 2.0),  # it forks: the copy must not answer
        ("Wordy", {"kwargs": {"words": ["word"] * 100_000}}, [{}], [None], 1e5),  # options larger than a pipe
    ],
)
def test_processes_that_fork_end_or_get_large_options(hosts, name, settings, rows, failures, reward):
    begun = time.monotonic()
    done, _ = run(hosts, tasks(spec(name, **settings), rows))
    assert [t.failure for t in done] == failures
    assert all(sum(turn.reward for turn in t.turns) == reward for t in done if not t.failure)
    assert time.monotonic() - begun < LOADING_SECONDS


def test_an_episode_fails_if_its_environment_cannot_be_started(hosts, monkeypatch):
    def full(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(hosts, "open", full)
    [lost], _ = run(hosts, tasks(spec(), [{"fault": None}]))
    assert lost.failure == "died: it could not be started (can't start new thread)"


def test_temporary_files_and_open_environments_are_removed(hosts):
    others = processes()
    [littered], _ = run(hosts, tasks(spec("Litters"), [{}]))
    file = Path(littered.messages[-1]["content"])
    assert file.parent.parent.name.startswith(FOLDER_PREFIX)

    def broken(*_):
        raise MemoryError

    before = descriptors()
    with pytest.raises(MemoryError):
        run(hosts, tasks(spec("Litters"), [{}] * 3), Scripted(broken))
    assert descriptors() == before
    deadline = time.monotonic() + PATIENCE
    while (file.parent.exists() or len(processes() - others) > 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not file.parent.exists()
    assert len(processes() - others) == 2  # the fork server and its warden


def test_many_unread_exit_messages_do_not_block_the_fork_server(hosts, monkeypatch):
    """Exit messages of forks may exceed any socket; here they are short."""
    made = socket.socketpair

    def short(*kind):
        for end in (pair := made(*kind)):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return pair

    monkeypatch.setattr(socket, "socketpair", short)
    lines = [hosts.open(spec(), 0)]

    def churn():
        for _ in range(200):
            hosts.open(spec(), 0).close()

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    thread.join(PATIENCE / 4)
    assert not thread.is_alive()
    lost = lines[0].server
    lost._child.process.kill()
    lost._child.process.wait()
    hosts.open(spec(), 0).close()
    # its sockets are closed: others may have their numbers
    with pytest.raises(EnvironmentFailed, match="died: it closed its end"):
        _answer(lines[0])
    lines[0].close()


def _answer(line):
    while (answer := line.read()) is None:
        time.sleep(0.05)
    return answer


# Time.


def meeting(folder, *episodes):
    """Rows of `worlds.Meets`, of which each has turns, the turn in which it arrives, and for how many it waits."""
    return [
        {"folder": str(folder), "place": i, "turns": turns, "arrives": arrives, "count": count}
        for i, (turns, arrives, count) in enumerate(episodes)
    ]


def test_fast_environments_do_not_wait_for_slow_ones(hosts, tmp_path):
    """The first is waiting, in its first turn, until the others have come to their last."""
    rows = meeting(tmp_path, (2, 0, 3), *[(4, 4, 0)] * 3)
    done, engine = run(hosts, tasks(spec("Meets"), rows))
    assert [(len(t.turns), t.failure) for t in done] == [(2, None), *[(4, None)] * 3]
    assert engine.waves[-1] == [0]


def test_requests_are_sent_as_episodes_are_ready(hosts):
    """The others do not wait for the first, whose turns take long."""
    with closing(Requests([1.0, 0.0, 0.0])) as engine:
        done, _ = run(hosts, tasks(spec("Slow"), [{"seconds": [0.0] * 3}] * 3), engine)
    assert [(len(t.turns), t.failure) for t in done] == [(3, None)] * 3
    assert engine.waves[-2:] == [[0], [0]]


def test_a_turn_that_takes_long_is_not_a_wait_for_an_environment(hosts, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.1)
    with closing(Requests([1.0])) as engine:
        done, _ = run(hosts, tasks(spec("Slow"), [{"seconds": [0.0] * 2}]), engine)
    assert [len(t.turns) for t in done] == [2]
    assert "environment Slow: no sign of life" not in caplog.text


def test_waves_of_turns_do_not_depend_on_the_time_that_environments_take(hosts):
    rows = [{"seconds": [0.3 * (i == k) for k in range(3)]} for i in range(3)]
    _, engine = run(hosts, tasks(spec("Slow"), rows), Scripted(waits=True))
    assert engine.waves == [[0, 1, 2]] * 3


def test_completions_of_a_prompt_play_the_same_game(hosts):
    done, _ = run(hosts, tasks(spec(), [{"fault": None}] * 4))
    said = [[m["content"] for m in t.messages if m["role"] == "user"] for t in done]
    assert said[0] == said[1] != said[2] == said[3]


# Tokens.


def test_the_sampled_tokens_are_the_trained_tokens(hosts):
    done, engine = run(hosts, tasks(spec(), [{"fault": None}] * 6))
    for number, trajectory in enumerate(done):
        assert [turn.sampled for turn in trajectory.turns] == engine.said[number]
        tree = trajectory.tree
        trained = [token for token, turn in zip(tree.ids, tree.turns, strict=True) if turn >= 0]
        assert trained == [token for said in engine.said[number] for token in said]
        assert len(trajectory.rows()) == 1
        text = tiny.tokenizer().decode(trajectory.turns[-1].context)
        assert text.replace(" ", "").startswith("go=")


def test_a_template_that_rewrites_the_history_makes_another_row(hosts):
    """It removes every a from messages of the assistant."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'].replace('a', '') }}<eos>"
        "{% else %}{{ m['content'] }}={% endif %}{% endfor %}"
    )
    a, b = (tiny.WORDS.index(letter) for letter in "ab")
    script = Scripted(lambda episode, turn: [a, b, EOS] if turn == 0 and episode == 0 else [b, EOS])
    (rewritten, plain), engine = run(hosts, tasks(spec(), [{"fault": None}] * 2), script, tokenizer=tokenizer)
    assert [t.sampled for t in rewritten.turns] == engine.said[0]
    assert (len(rewritten.rows()), len(plain.rows())) == (2, 1)
    assert rewritten.turns[1].context[:4] == [*tokenizer("go=")["input_ids"], b]


def test_special_tokens_in_observations_are_text(hosts):
    given = [{"role": "user", "content": "a<eos>b\ud800"}, {"role": "<eos>", "content": "", "name": "<eos>"}]
    split = [{"role": "user", "content": "a< eos>b?"}, {"role": "< eos>", "content": "", "name": "< eos>"}]
    assert Renderer(tiny.tokenizer(), {}).harmless(given) == split
    todo = tasks(spec(), [{"fault": None}] * 2)
    todo[0] = replace(todo[0], prompt=[{"role": "user", "content": "\ud800"}])  # which the tokenizer refuses
    done, _ = run(hosts, todo)
    assert [t.failure and t.failure.partition(":")[0] for t in done] == ["template", None]


@pytest.mark.parametrize("afresh", [False, True])
def test_an_episode_fails_if_the_template_leaves_out_an_observation(hosts, afresh):
    """It renders the first message alone where `afresh`, else no message of a user after the first."""
    tokenizer = tiny.tokenizer()
    only = "m['role'] == 'user'" if afresh else "m['role'] == 'assistant' or loop.first"
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% if {only} %}}{{{{ m['content'] }}}}={{% endif %}}{{% endfor %}}"
    )
    row = {"observation": [{"role": "tool", "content": "5"}], "afresh": afresh}
    [lost], _ = run(hosts, tasks(spec("Says"), [row]), tokenizer=tokenizer)
    assert lost.failure.startswith("template: the chat template of ")
    assert "leaves out a message of role 'tool' ('5')" in lost.failure
    assert len(lost.turns) == 1


@pytest.mark.parametrize(("counts_all", "turns"), [(True, 2), (False, 3)])
def test_the_limit_counts_all_tokens_or_those_of_the_policy(hosts, counts_all, turns):
    """A turn has two tokens, an observation three."""
    limits = replace(LIMITS, completion=7, counts_all=counts_all)
    [t], _ = run(hosts, tasks(spec(), [{"fault": None}]), Scripted(lambda *_: [5, EOS]), limits)
    assert len(t.turns) == turns
    assert t.truncated == counts_all


def test_a_turn_that_does_not_end_is_the_last_and_so_is_that_of_max_turns(hosts):
    todo = [*tasks(spec(), [{"fault": None}]), *tasks(spec(max_turns=2), [{"fault": None}])]
    script = Scripted(lambda episode, turn: [5, EOS] if episode else [5] * 9)
    (endless, ended), _ = run(hosts, todo, script, replace(LIMITS, completion=20))
    assert ([turn.sampled for turn in endless.turns], endless.truncated, endless.failure) == ([[5] * 9], True, None)
    assert ([turn.reward for turn in ended.turns], ended.truncated) == ([0.25, 0.25], True)  # it was judged


# Here and now, and in threads.


@pytest.mark.parametrize("where", [{}, {"environment": worlds.Meets}, {"isolate": False}])
def test_environments_in_processes_and_threads_run_in_parallel(hosts, where, tmp_path):
    rows = meeting(tmp_path, *[(2, 1, 20)] * 20)
    done, _ = run(hosts, tasks(replace(spec("Meets"), **where), rows))
    assert [(t.failure, sum(turn.reward for turn in t.turns)) for t in done] == [(None, 2.0)] * 20


def test_environments_in_this_process_are_played_in_waves(hosts):
    [guess], _ = parse_environments([{"name": "guess", "kwargs": {"high": 9, "guesses": 3}}])
    nine = tiny.WORDS.index("9")
    script = Scripted(lambda episode, turn: [nine - (episode == 1), EOS])
    done, engine = run(hosts, tasks(guess, [{"solution": "9"}, {"solution": "9"}, {"solution": "1"}]), script)
    assert [[turn.reward for turn in t.turns] for t in done] == [[1.0], [-0.0] * 3, [-0.0] * 3]
    assert [m["content"] for m in done[2].messages] == ["9", "lower", "9", "lower", "9", "lower"]
    assert engine.waves == [[0, 1, 2], [1, 2], [1, 2]]
