"""What agents may ask in a bad moment, a bad form, or for too much: limits, clocks and options, by hand."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import openai
import psutil
import pytest

from grpo_ext.environments import agents as agents_module
from grpo_ext.environments import compatibility, loop
from grpo_ext.environments import hosts as hosting
from grpo_ext.environments.agents import Agents
from grpo_ext.environments.composition import parse_environments
from grpo_ext.environments.endpoint.history import History
from grpo_ext.environments.endpoint.requests import ChatRequest, PendingRequest
from grpo_ext.environments.endpoint.server import Inbox
from grpo_ext.environments.episode import Episode, EpisodeLimits
from grpo_ext.environments.hosts import EnvironmentHost
from grpo_ext.environments.library.command import model_variables
from grpo_ext.environments.protocol import AgentTask
from grpo_ext.environments.rendering import Renderer, TooLong
from grpo_ext.objective.trajectory import Sample
from grpo_ext.trainer.episodes import EpisodeRunner
from support import speakers, tiny
from support.agent_runs import EOS, Random, run, spec, tasks
from support.agents import GO, three_turns
from support.processes import PATIENCE

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]


@pytest.fixture
def hosts():
    opened = EnvironmentHost(memory_gib=4.0)
    yield opened
    opened.close()


def limits(completion):
    return EpisodeLimits(completion=completion, counts_all=True, context=None, ends=frozenset([EOS]))


# Depth.


def nested(depth):
    return "[" * depth + "]" * depth


async def asks_deep(row, client):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {nested(900)}}}'}}
    messages = [
        *GO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    await client.chat.completions.create(model="m", messages=messages)
    return 1.0


def test_arguments_that_are_too_deep_are_text(hosts):
    [deep, sound], _ = run(hosts, tasks(spec(asks_deep), [{}]) + tasks(spec(three_turns), [{}]))
    assert [(made.failure, made.reward, len(made.turns)) for made in (deep, sound)] == [(None, 1.0, 1), (None, 7.0, 3)]


@pytest.mark.parametrize(("depth", "calls"), [(50, 1), (900, 0), (100_000, 0)])
def test_a_sampled_call_that_is_too_deep_is_text(depth, calls):
    tokenizer = speakers.tokenizer()
    episode_runner = EpisodeRunner([spec(three_turns)], tokenizer, 4.0)
    said = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {nested(depth)}}}}}\n</tool_call><|im_end|>'
    message = episode_runner._parsed(tokenizer(said, add_special_tokens=False)["input_ids"], [], TOOLS)
    episode_runner.close()
    assert len(message.get("tool_calls", [])) == calls
    assert ("tool_call" in str(message["content"])) == (not calls)


async def asks_twice(row, client):
    found = []
    for _ in range(2):
        try:
            await client.with_options(max_retries=0).chat.completions.create(model="m", messages=GO)
        except openai.BadRequestError as error:
            found.append(error.body["message"])
    assert found == ["ZeroDivisionError: of a kind that nobody foresaw"], found
    return 1.0


def test_what_nobody_foresaw_is_a_refusal(hosts, monkeypatch):
    opened, seen = History.opened, []

    def fails_once(self, request):
        seen.append(request)
        if len(seen) == 1:
            raise ZeroDivisionError("of a kind that nobody foresaw")
        return opened(self, request)

    monkeypatch.setattr(History, "opened", fails_once)
    [made], _ = run(hosts, tasks(spec(asks_twice), [{}]))
    assert (made.failure, len(made.turns)) == (None, 1)


# Clocks.


def test_a_clock_goes_on_where_it_stood_or_anew(hosts, monkeypatch):
    connection = hosts.open(spec(three_turns), 0)
    now = [100.0]
    monkeypatch.setattr(hosting.time, "monotonic", lambda: now[0])
    connection.stream.sent_at, connection.seconds = 100.0, connection.spec.turn_timeout
    whole = connection.spec.turn_timeout
    now[0] = 101.0
    connection.pause()
    assert connection.deadline == float("inf")
    now[0] = 109.0
    connection.resume(anew=False)
    connection.resume(anew=False)  # twice, as after two refusals
    assert connection.deadline == 109.0 + whole - 1.0
    connection.pause()
    now[0] = 120.0
    connection.resume(anew=True)
    assert connection.deadline == 120.0 + whole
    connection.close()


class Late(Random):
    """Answers each turn a moment after it was asked, as a server of samples does."""

    def __init__(self, seconds):
        super().__init__()
        self.descriptor, self._bell = os.pipe()
        self._queue, self._seconds, self.limits = [], seconds, []

    @property
    def pending(self):
        return len(self._queue)

    def generate(self, asked):
        self.limits += [one.limit for one in asked]
        for one in asked:
            self._queue.append((time.monotonic() + self._seconds, one))
            threading.Timer(self._seconds + 0.01, os.write, (self._bell, b".")).start()
        done = [one for when, one in self._queue if when <= time.monotonic()]
        self._queue = [(when, one) for when, one in self._queue if one not in done]
        if done:
            os.read(self.descriptor, 4096)
        return [(one, Sample([3] * one.limit, [-0.5] * one.limit)) for one in done]


async def gives_up(row, client):
    short = client.with_options(timeout=0.3, max_retries=1)
    with pytest.raises(openai.APITimeoutError):
        await short.chat.completions.create(model="m", messages=GO, max_tokens=3)
    await asyncio.sleep(1.5)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "b"}], max_tokens=3)
    return 1.0


def test_a_turn_that_its_agent_did_not_wait_for_is_not_trained(hosts):
    [made], _ = run(hosts, tasks(spec(gives_up, max_turns=2), [{}]), Late(1.0))
    assert (made.failure, made.reward, made.truncated) == (None, 1.0, False)
    assert [turn.sampled for turn in made.turns] == [[3, 3, 3]]


def test_what_an_agent_never_waits_for_is_not_sampled_for_ever(hosts):
    made, [task] = (
        Agents(Renderer(tiny.tokenizer(), {}), None, limits(400), True),
        tasks(spec(three_turns, max_turns=3), [{}]),
    )
    episode, refused, accepted = Episode(0, task, hosts.open(task.spec, 0)), [], 0
    made.begin(episode, hosts.endpoint)
    for _ in range(6):
        request = PendingRequest(episode.line.number, ChatRequest(GO), refused.append)
        made._inbox.put(request)
        calls = made.take()
        accepted += len(calls)
        request.left = True
        assert made.limited(calls) == ([], [])
    assert (accepted, [one.code for one in refused]) == (4, ["turn_limit_exceeded"] * 2)
    made.close()
    episode.connection.close()


# Room.


async def eight_at_once(row, client):
    contents = [(letter * 40 if row["apart"] else "x" * 40) for letter in "abcdefgh"]
    asked = (
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], max_tokens=3)
        for content in contents
    )
    made = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in made if isinstance(one, openai.BadRequestError)]
    assert {one.code for one in refused} <= {"context_length_exceeded"}
    return float(len(refused))


def test_contexts_at_once_count_once_and_against_the_limit(hosts):
    [apart], _ = run(hosts, tasks(spec(eight_at_once), [{"apart": True}]), limits=limits(150))
    [same], _ = run(hosts, tasks(spec(eight_at_once), [{"apart": False}]), limits=limits(150))
    assert apart.reward > 0
    assert len(apart.tree.ids) <= 150
    assert (same.reward, same.truncated) == (0.0, False)


async def staggered(row, client):
    async def ask(place):
        await asyncio.sleep(0.1 * place)
        await client.chat.completions.create(model="m", messages=GO, max_tokens=row["limit"])

    made = await asyncio.gather(*(ask(place) for place in range(3)), return_exceptions=True)
    assert [one.code for one in made if one is not None] == ["context_length_exceeded"] * row["refused"]
    return 1.0


@pytest.mark.parametrize(("limit", "given"), [(None, [100]), (60, [60, 40]), (30, [30, 30, 30])])
def test_turns_that_are_being_sampled_keep_their_room(hosts, limit, given):
    engine = Late(0.5)
    rows = [{"limit": limit, "refused": 3 - len(given)}]
    [made], _ = run(hosts, tasks(spec(staggered), rows), engine, limits(100))
    assert made.failure is None
    assert engine.limits == given
    assert made.truncated == (len(given) < 3)


# Options.


async def agent(row, client, most):
    return float(most)


async def clashes(row, client, function):
    return 1.0


RUN = {"run": ["python3", "{folder}/a.py"]}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"path": agent}, "missing a required argument: 'most'"),
        ({"path": agent, "kwargs": {"mots": 1}}, "missing a required argument: 'most'"),
        ({"path": agent, "kwargs": {"most": 1, "mots": 1}}, "unexpected keyword argument 'mots'"),
        ({"path": clashes, "kwargs": {"function": 1}}, "path sets them already"),
        ({"name": "command", "kwargs": {"run": ["a-program-that-is-not-there"]}}, "no such program"),
        ({"name": "command", "kwargs": RUN | {"test": ["a-program-that-is-not-there"]}}, "no such program"),
        ({"name": "command", "kwargs": RUN | {"env": {"N": 3}}}, "not a mapping of texts to texts"),
        ({"name": "command", "kwargs": RUN | {"files": {"a.json": {"b": "c"}}}}, "not a mapping of texts to texts"),
        ({"name": "command", "kwargs": RUN | {"files": {"/a.json": "c"}}}, "a path that leaves the episode's folder"),
        ({"name": "command", "kwargs": RUN | {"reward_file": "r"}}, "has no effect with reward: exit"),
        ({"name": "command", "kwargs": RUN | {"reward": "file", "reward_file": 5}}, "a path that leaves"),
        (
            {"name": "command", "kwargs": RUN | {"reward": "file", "reward_file": "../r"}},
            "a path that leaves the episode's folder",
        ),
        ({"name": "command", "kwargs": RUN, "secrets": ["NOT_THERE_KEY"]}, "not set in the environment"),
        ({"name": "command", "kwargs": RUN, "secrets": "HF_TOKEN"}, "not a list"),
        ({"name": "guess", "secrets": ["PATH"]}, "only agents are kept from secrets"),
        ({"name": "command", "kwargs": RUN, "isolate": False}, "would have the secrets of this process"),
        ({"name": "command", "kwargs": RUN | {"reward": "none", "test": ["true"]}}, "pays nothing with reward: none"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_start(entry, reason):
    _, problems = parse_environments([entry])
    assert any(reason in problem.reason for problem in problems), problems


@pytest.mark.parametrize(
    "options",
    [
        RUN,
        {"run": ["./a.sh"], "files": {"a.sh": "true"}},
        {"run": ["a.sh"], "env": {"PATH": "{folder}"}},
        {"run": ["{program}"], "reward": "file", "reward_file": "r"},
    ],
)
def test_a_program_of_the_episode_is_looked_for_there(options):
    assert parse_environments([{"name": "command", "kwargs": options}])[1] == []


def test_hosts_that_need_no_proxy_stay(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "internal.example")
    monkeypatch.delenv("no_proxy", raising=False)
    found = model_variables(AgentTask({}, "http://127.0.0.1:1/1", "key"))
    assert (found["NO_PROXY"], found["no_proxy"]) == ("internal.example,127.0.0.1", "127.0.0.1")


def test_output_and_key_of_a_program_in_its_failure(hosts):
    program = "import os, sys; print('a\\x1b[31m\\nb' * 300, os.environ['OPENAI_API_KEY']); sys.exit(1)"
    options = {"run": ["python3", "-c", program]}
    [made], _ = run(hosts, tasks(spec("command", kwargs=options), [{}]))
    assert made.failure.endswith("b a ba b (its key)"[-10:])
    assert not set("\n\x1b") & set(made.failure)
    assert len(made.failure) < 600


def test_a_test_that_a_signal_ends_pays_nothing(hosts):
    ask = "import openai; openai.OpenAI().chat.completions.create(model='m', messages=" + json.dumps(GO) + ")"
    kill = ["python3", "-c", "import os; os.kill(os.getpid(), 11)"]
    [made], _ = run(hosts, tasks(spec("command", kwargs={"run": [sys.executable, "-c", ask], "test": kill}), [{}]))
    assert (made.failure, made.reward, len(made.turns)) == (None, 0.0, 1)


STRAYS = """
import os, subprocess, sys, time
strays = [f"{how} sleep 3600 > /dev/null & echo $!" for how in ("", "setsid", "cd /; env -i setsid")]
pids = [subprocess.run(["sh", "-c", line], stdout=-1, start_new_session=True).stdout.decode() for line in strays]
killed = os.getpid()
for _ in range(int(sys.argv[1])):
    killed = int(open(f"/proc/{killed}/stat").read().rsplit(")")[-1].split()[1])
with open(os.environ["PLACE"] + ".new", "w") as file:
    file.write(f"{os.getpid()} {killed} {' '.join(pids)}")
os.rename(file.name, os.environ["PLACE"])
os.kill(killed, 9)
time.sleep(3600)
"""
HELD = """
import sys
from grpo_ext.child_processes import Warded
held = Warded([sys.executable, "-c", sys.argv[1], "2"])
held.process.wait()
"""


def gone(place):
    """Wait until the processes whose PIDs are in a file have ended."""
    end = time.monotonic() + PATIENCE
    while not place.exists() and time.monotonic() < end:
        time.sleep(0.02)
    left = {int(pid) for pid in place.read_text().split()}
    assert len(left) == 5
    while any(map(runs, left)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(runs, left))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("killed", range(1, 5))  # its warden, the episode, the fork server, the server's warden
def test_no_program_outlives_the_processes_above_it(hosts, tmp_path, killed):
    options = {"run": [sys.executable, "-c", STRAYS, str(killed)], "env": {"PLACE": str(tmp_path / "pids")}}
    [made], _ = run(hosts, tasks(spec("command", kwargs=options), [{}]))
    assert made.failure.startswith("raised: " if killed == 1 else "died: ")
    assert gone(tmp_path / "pids")


def test_no_program_outlives_the_trainer(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PLACE": str(tmp_path / "pids")}
    trainer = subprocess.Popen([sys.executable, "-c", HELD, STRAYS], env=env)
    assert gone(tmp_path / "pids")
    assert trainer.wait() == -signal.SIGKILL


def test_an_agent_gets_no_secret_of_the_trainer_that_its_entry_does_not_name(hosts, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hardly.guessed")
    monkeypatch.setenv("NAMED_API_KEY", "named by its entry")
    program = "import os; print(os.environ.get('HF_TOKEN'), os.environ.get('NAMED_API_KEY'), os.environ['MY_TOKEN'])"
    options = {"run": [sys.executable, "-c", program], "env": {"MY_TOKEN": "own"}}
    given = spec("command", kwargs=options, secrets=["NAMED_API_KEY"])
    [made], _ = run(hosts, tasks(given, [{}]))
    assert made.failure.endswith("None *** own")  # and what it prints is shown without them
    [made], _ = run(hosts, tasks(spec("support.agents:environment"), [{}]))
    assert made.failure.endswith("RuntimeError: HF_TOKEN is None")


class Counting:
    """A tokenizer that counts the characters that it reads."""

    def __init__(self):
        self.real, self.read = tiny.tokenizer(), 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __call__(self, text, **options):
        self.read += len(text)
        return self.real(text, **options)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_request_far_beyond_the_room_is_refused_before_it_is_read_whole(role):
    tokenizer, most = Counting(), 1000
    history = History(Renderer(tokenizer, {}), most)
    messages = [{"role": "user", "content": "go"}, {"role": role, "content": "a b c " * 1_000_000}]
    with pytest.raises(TooLong, match=r"more than 1,000 tokens"):
        history.opened(ChatRequest(messages))
    assert tokenizer.read < 2**18


@pytest.mark.parametrize("most", [1, 10, 1000])
def test_what_fits_is_not_refused(most):
    renderer = Renderer(tiny.tokenizer(), {})
    text = "a" * (9 * most)  # many characters for what the model has room for
    ids = renderer._encoded(text)
    assert renderer._encoded(text, len(ids)) == ids
    many = ["go"] * 20_000
    assert len(renderer.opening([{"role": "user", "content": text} for text in many], None).ids) > 20_000


def test_many_requests_leave_time_to_look_at_the_end_of_the_run(monkeypatch):
    made = Agents(Renderer(tiny.tokenizer(), {}), None, None, True)
    made._inbox = Inbox()
    asked = [PendingRequest(i, ChatRequest(GO), print) for i in range(5)]
    for request in asked:
        made._inbox.put(request)
    monkeypatch.setattr(agents_module.shutdown(), "is_set", lambda: True)
    made.take()
    assert list(made._inbox._requests) == asked[1:]
    monkeypatch.undo()
    made.take()
    assert not made._inbox._requests
    made.close()


class Seen(Random):
    """Notes how many episodes are open."""

    most = 0

    def generate(self, asked):
        self.most = max(self.most, len(self.hosts.endpoint._lines))
        return super().generate(asked)


def test_episodes_are_played_in_turn_where_descriptors_are_few(hosts, monkeypatch):
    monkeypatch.setattr(loop, "most_episodes", lambda: 3)
    engine = Seen()
    engine.hosts = hosts
    made, _ = run(hosts, tasks(spec(three_turns), [{}] * 10), engine)
    assert [one.failure for one in made] == [None] * 10
    assert engine.most == 3


def in_a_fork(check):
    """Return whether `check` is true in a process of its own."""
    process = os.fork()
    if process == 0:
        os._exit(0 if check() else 1)
    return os.waitpid(process, 0)[1] == 0


def limited_to(soft, hard):
    used = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + soft, used + hard))
    return used


def test_the_limit_of_descriptors_is_raised_as_far_as_it_goes():
    def check():
        used = limited_to(70, 200)
        return (hosting.most_episodes() == (200 - 64) // 4 or print(hosting.most_episodes())) and (
            resource.getrlimit(resource.RLIMIT_NOFILE) == (used + 200, used + 200)
        )

    assert in_a_fork(check)


def test_too_few_descriptors_are_refused_before_the_start(monkeypatch):
    assert not [*compatibility.setting_problems([spec(three_turns)], SimpleNamespace())]
    monkeypatch.setattr(compatibility, "most_episodes", lambda raised: 4)
    [problem] = compatibility.setting_problems([spec(three_turns)], SimpleNamespace())
    assert "suffice for 4 episodes" in problem.reason
