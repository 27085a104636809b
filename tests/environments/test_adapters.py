"""Environments of other projects as they are asked, where those are installed."""

import importlib.util
import socket
import threading
import time

import pytest

from grpo_ext.environments.composition import parse
from grpo_ext.environments.session import Session
from support.processes import PATIENCE

TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Sums(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class TwiceAsked(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Are you sure?")


class SumsTaskset(vf.Taskset[Sums, vf.TasksetConfig]):
    def load(self):
        return [Sums(Data(prompt=f"{n} + 1", system_prompt="Add.", answer=str(n + 1))) for n in range(7)]


__all__ = ["SumsTaskset", "TwiceAsked"]
"""


@pytest.mark.parametrize(("name", "package"), [("verifiers/sums", "verifiers"), ("openenv/http://a", "openenv")])
def test_an_environment_whose_package_is_missing_is_refused(name, package):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    _, [problem] = parse([name])
    assert f"Install grpo-ext[{package}]" in str(problem)


def asked(session, text):
    return session.answer(("step", {"role": "assistant", "content": text}))


@pytest.fixture
def sums(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "two_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    return "verifiers/two_sums"


@pytest.mark.filterwarnings("ignore")
def test_a_taskset_of_verifiers_is_played_and_scored_by_verifiers(sums):
    [spec], problems = parse([{"name": sums, "kwargs": {"tasks": 5}}])
    assert not problems
    for row, prompt, answer, reward in [({"idx": 2}, "2 + 1", "3", 0.5), ({}, "4 + 1", "9", 0.0)]:
        session = Session(spec.make, (), seed=9)  # of five tasks the fourth
        assert [m["content"] for m in session.answer(("reset", row))["opening"]] == ["Add.", prompt]
        again = asked(session, "perhaps")
        assert (again["observation"], again["afresh"]) == ([{"role": "user", "content": "Are you sure?"}], False)
        end = asked(session, answer)
        assert (end["done"], end["reward"]) == (True, reward)
        assert session.answer(("finish", None)) == {"reward": None}
        session.close()


@pytest.mark.filterwarnings("ignore")
def test_an_episode_of_verifiers_that_is_cut_is_ended(sums):
    [spec], _ = parse([sums])
    session = Session(spec.make, (), seed=0)
    session.answer(("reset", {}))
    assert session.answer(("finish", None)) == {"reward": None}
    assert session._environment._episode.cancelled()
    session.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kwargs", "word"),
    [({"taskset": {"nothing": 1}}, "nothing"), ({"id": "user-sim"}, "2 models"), ({"tasks": 0}, "1")],
)
def test_what_one_model_cannot_play_is_refused(sums, kwargs, word):
    _, [problem] = parse([{"name": sums, "kwargs": kwargs}])
    assert word in str(problem)


@pytest.mark.filterwarnings("ignore")
def test_a_taskset_with_tools_is_refused(sums, monkeypatch):
    import verifiers.v1 as vf

    monkeypatch.setattr(vf.Task, "toolsets", classmethod(lambda *_: [object()]))
    _, [problem] = parse([{"name": sums, "kwargs": {"tasks": 3}}])  # what has been loaded is kept
    assert "it offers tools" in str(problem)


@pytest.fixture
def server():
    """A counter's address, and what ends it."""
    pytest.importorskip("openenv.core")
    import uvicorn
    from openenv.core.env_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Add(Action):
        number: int

    class Seen(Observation):
        text: str

    class Counter(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def reset(self, seed=None, **_):
            self.total = seed
            return Seen(text=f"at {self.total}")

        def step(self, action, **_):
            self.total += action.number
            return Seen(text=f"at {self.total}", reward=0.25, done=self.total > 10)

    app = create_app(Counter, Add, Seen, env_name="counter", max_concurrent_envs=4)
    listening = socket.create_server(("127.0.0.1", 0))
    made = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=made.run, args=([listening],), daemon=True)
    thread.start()
    end = time.monotonic() + PATIENCE
    while not made.started and time.monotonic() < end:
        time.sleep(0.05)

    def stop():
        made.should_exit = made.force_exit = True
        thread.join(PATIENCE)

    yield f"openenv/http://127.0.0.1:{listening.getsockname()[1]}", stop
    stop()


@pytest.mark.filterwarnings("ignore")
def test_a_server_of_openenv_is_played(server):
    name, stop = server
    [spec], problems = parse([{"name": name, "kwargs": {"action": "number", "observation": "text"}}])
    assert not problems
    sessions = [Session(spec.make, (), seed=seed) for seed in (5, 7)]
    assert [s.answer(("reset", {}))["opening"][0]["content"] for s in sessions] == ["at 5", "at 7"]
    refused = asked(sessions[0], "three")
    assert "This is no action" in refused["observation"]
    assert refused["done"] is False
    assert [(a["observation"], a["reward"], a["done"]) for a in (asked(s, " 4\n") for s in sessions)] == [
        ("at 9", 0.25, False),
        ("at 11", 0.25, True),
    ]
    assert sessions[1].answer(("finish", None)) == {"reward": None}
    stop()
    assert asked(sessions[0], "1")["failed"][0] == "raised"
    for session in sessions:
        session.close()


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_server_of_openenv_is_refused(server):
    name, _ = server
    for entry, word in [(name, "number"), ({"name": "openenv/http://127.0.0.1:9"}, "no server")]:
        _, [problem] = parse([entry])
        assert word in str(problem)
