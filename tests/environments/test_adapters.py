"""Environments of other projects as they are asked, where those are installed."""

import importlib.util
import socket
import threading
import time

import pytest

from grpo_ext.environments.composition import parse_environments
from grpo_ext.environments.session import Session
from support.processes import PATIENCE


def test_an_environment_whose_package_is_missing_is_refused():
    if importlib.util.find_spec("openenv"):
        pytest.skip("openenv is installed")
    _, [problem] = parse_environments(["openenv/http://a"])
    assert "Install grpo-ext[openenv]" in str(problem)


def asked(session, text):
    return session.answer(("step", {"role": "assistant", "content": text}))


@pytest.fixture
def server():
    """A counter's address, and what ends it."""
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
@pytest.mark.extra("openenv")
def test_a_server_of_openenv_is_played(server):
    name, stop = server
    [spec], problems = parse_environments([{"name": name, "kwargs": {"action": "number", "observation": "text"}}])
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
@pytest.mark.extra("openenv")
def test_what_is_no_server_of_openenv_is_refused(server):
    name, _ = server
    for entry, word in [(name, "number"), ({"name": "openenv/http://127.0.0.1:9"}, "no server")]:
        _, [problem] = parse_environments([entry])
        assert word in str(problem)
