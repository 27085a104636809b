"""Agents that call the model over HTTP: real servers, real processes, a scripted policy."""

import asyncio
import contextlib
import json
import os
import random
import re
import threading
import time
from collections import Counter
from dataclasses import replace

import anthropic
import httpx
import openai
import psutil
import pytest
from trl.chat_template_utils import parse_response

from grpo_ext.environments.compatibility import reader_of
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.episode import EpisodeLimits, Task
from grpo_ext.environments.hosts import EnvironmentHost
from grpo_ext.environments.loop import EpisodeLoop
from grpo_ext.environments.protocol import Conversation, Step
from grpo_ext.environments.rendering import Renderer
from grpo_ext.objective.trajectory import Sample
from support import agent_runs, agents, speakers
from support.agent_runs import EOS, LETTERS, Random, run, spec, tasks
from support.agents import GO, three_turns
from support.processes import PATIENCE

EPISODES = int(os.environ.get("EPISODES", "40"))


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


# Agents that are functions of this process.


def test_an_agent_trains_what_it_was_answered(hosts):
    made, engine = run(hosts, tasks(spec(three_turns), [{}] * 3))
    for number, trajectory in enumerate(made):
        assert trajectory.failure is None
        assert trajectory.reward == 7.0
        assert [(turn.context, turn.sampled) for turn in trajectory.turns] == engine.seen[number]
        assert len(trajectory.turns) == 3
        assert len(trajectory.rows()) == 1
        assert [m["role"] for m in trajectory.messages] == ["assistant", "user", "assistant", "user", "assistant"]


class Same(Conversation):
    """What `three_turns` is for the model, played as a conversation."""

    in_process = True

    def reset(self, row):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        return Step("on", None, self.turns == 3)


def test_an_agent_is_the_same_episode_as_a_conversation(hosts):
    asked, _ = run(hosts, tasks(spec(three_turns), [{}] * 4))
    played, _ = run(hosts, tasks(EnvironmentSpec("same", Same), [{}] * 4))
    assert [[(t.context, t.sampled, t.logprobs) for t in made.turns] for made in asked] == [
        [(t.context, t.sampled, t.logprobs) for t in made.turns] for made in played
    ]
    assert [made.tree.parents for made in asked] == [made.tree.parents for made in played]
    assert [[m["content"] for m in a.messages] for a in asked] == [
        [m["content"] for m in p.messages[:5]] for p in played
    ]


async def in_parallel(row, client):
    async def ask(text):
        messages = [{"role": "user", "content": text}]
        return await client.chat.completions.create(model="m", messages=messages, n=2, logprobs=True)

    made = await asyncio.gather(*(ask(text) for text in "abc"))
    for one in made:
        assert len(one.choices) == 2
        assert one.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in one.choices)
    return 1.0


@pytest.mark.parametrize("waits", [False, True])
def test_requests_in_parallel_and_several_answers_are_turns_of_their_own(hosts, waits):
    [made], engine = run(hosts, tasks(spec(in_parallel), [{}]), Random(waits))
    assert made.failure is None
    assert Counter(tuple(turn.context) for turn in made.turns) == Counter(tuple(c) for c, _ in engine.seen[0])
    assert sorted(turn.sampled for turn in made.turns) == sorted(ids for _, ids in engine.seen[0])
    assert len(made.turns) == 6


async def stopped(row, client):
    messages = [{"role": "user", "content": "go"}]
    made = await client.chat.completions.create(model="m", messages=messages, stop=["e"], logprobs=True)
    assert made.choices[0].message.content == "a b c d "
    assert [one.token for one in made.choices[0].logprobs.content] == list("abcde")
    short = await client.chat.completions.create(model="m", messages=messages, max_tokens=2)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("a b", "length")
    return 1.0


class Alphabet(Random):
    def generate(self, asked):
        return [(one, Sample([*LETTERS, EOS][: one.limit], [-0.5] * min(27, one.limit))) for one in asked]


def test_what_follows_a_stop_text_is_not_of_the_turn(hosts):
    [made], _ = run(hosts, tasks(spec(stopped), [{}]), Alphabet())
    assert made.failure is None
    assert [turn.sampled for turn in made.turns] == [[3, 4, 5, 6, 7], [3, 4]]
    assert made.turns[0].logprobs == [-0.5] * 5
    assert not made.truncated


async def insists(row, client):
    found = []
    messages = [{"role": "user", "content": "go" * row["length"]}]
    for _ in range(4):
        try:
            made = await client.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": made.choices[0].message.content}, *GO]
        except openai.BadRequestError as error:
            found.append(error.code)
    assert found == row["found"], found
    return 0.5


@pytest.mark.parametrize(
    ("length", "completion", "context", "found", "turns"),
    [
        (1, 400, None, ["turn_limit_exceeded"] * 2, 2),
        (1, 400, 2, ["context_length_exceeded"] * 4, 0),
        (8, 6, None, ["context_length_exceeded"] * 3, 1),
    ],
)
def test_limits_refuse_requests_and_the_episode_is_cut(hosts, length, completion, context, found, turns):
    limits = EpisodeLimits(completion=completion, counts_all=True, context=context, ends=frozenset([EOS]))
    rows = [{"length": length, "found": found}]
    [made], _ = run(hosts, tasks(spec(insists, max_turns=2), rows), Random(letters=7), limits)
    assert made.failure is None
    assert made.truncated
    assert made.reward == 0.5
    assert sum(bool(turn.sampled) for turn in made.turns) == turns


async def minds_no_limit(row, client):
    messages = [{"role": "user", "content": "go" * row["length"]}]
    for _ in range(4):
        made = await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": made.choices[0].message.content}, *GO]
    return 0.5


@pytest.mark.parametrize(("completion", "most"), [(400, 2), (12, 9)])
def test_an_agent_that_raises_at_a_limit_is_paid_0(hosts, completion, most):
    limits = EpisodeLimits(completion=completion, counts_all=True, context=None, ends=frozenset([EOS]))
    [made], _ = run(hosts, tasks(spec(minds_no_limit, max_turns=most), [{"length": 1}]), Random(letters=7), limits)
    assert (made.failure, made.reward, made.truncated) == (None, 0.0, True)
    assert made.turns
    assert len(made.turns) <= 2


def test_a_first_request_without_room_is_a_failure(hosts):
    limits = EpisodeLimits(completion=400, counts_all=True, context=2, ends=frozenset([EOS]))
    [made], _ = run(hosts, tasks(spec(minds_no_limit), [{"length": 8}]), limits=limits)
    assert made.reward is None
    assert re.match("raised: run: .*no room for an answer", made.failure)


async def speaks_otherwise(row, client):
    """By Anthropic's client."""
    url = str(client.base_url).removesuffix("/v1/")
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=client.api_key, http_client=http) as other:
        messages = [{"role": "user", "content": "count"}]
        options = {"model": "m", "max_tokens": 300, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
        for k in range(4):
            if k % 2:
                async with other.messages.stream(messages=messages, **options) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await other.messages.create(messages=messages, **options)
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert (answer.stop_reason == "tool_use") is bool(calls)
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results or "on"}]
        with contextlib.suppress(anthropic.BadRequestError):
            await other.messages.create(messages=messages, **options, tool_choice={"type": "any"})
            raise AssertionError
        assert (await http.post(f"{url}/messages")).status_code == 401  # by clients that add no /v1 to the base
    return 1.0


async def responds(row, client):
    """By OpenAI's responses."""
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    items = [{"role": "user", "content": "count"}]
    for k in range(4):
        options = {"model": "m", "input": items, "tools": [add], "instructions": "be brief", "store": False}
        if k % 2:
            async with client.responses.stream(**options) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await client.responses.create(**options)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert answer.status == "completed"
        assert bool(answer.output_text) or calls
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
        items += [] if calls else [{"role": "user", "content": "on"}]
    with contextlib.suppress(openai.BadRequestError):
        await client.responses.create(model="m", input="on", previous_response_id=answer.id)
        raise AssertionError
    return 1.0


class Calls(Random):
    """Calls a tool in every other turn."""

    def generate(self, asked):
        made, found = speakers.tokenizer(), []
        for one in asked:
            turns = self.seen.setdefault(one.episode, [])
            text = "ab<|im_end|>" if len(turns) % 2 else speakers.called("add", number=1)
            turns.append((one.context, made(text, add_special_tokens=False)["input_ids"]))
            found.append((one, Sample(turns[-1][1], None)))
        return found


@pytest.mark.parametrize("agent", [speaks_otherwise, responds])
def test_requests_of_other_dialects_are_turns_too(hosts, agent):
    [(made, figures)], engine = run_with_tools(hosts, tasks(spec(agent), [{}]), Calls())
    assert made.failure is None
    assert [(turn.context, turn.sampled) for turn in made.turns] == engine.seen[0]
    assert (figures.turns, figures.calls, len(made.rows())) == (4, 2, 1)


# Random agents with tools, over HTTP.

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]


async def wanders(row, client):
    """Calls tools, drops thinking, takes back turns and asks twice."""
    draw = random.Random(row["place"])
    messages = [{"role": "user", "content": "count"}]
    for _ in range(draw.randint(1, 6)):
        tools = TOOLS if draw.random() < 0.7 else openai.omit
        if draw.random() < 0.3:
            stream = await client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True)
            answer = {"role": "assistant", "content": ""}
            async for chunk in stream:
                answer["content"] += chunk.choices[0].delta.content or ""
            calls = []
        else:
            made = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            answer = made.choices[0].message.model_dump(exclude_none=True)
            calls = answer.get("tool_calls", [])
        if draw.random() < 0.3:
            answer.pop("reasoning_content", None)
        if draw.random() < 0.2:
            continue  # the same request again
        messages.append(answer)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "7 <|im_end|>"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": draw.choice(["more", "<think>", "a\n"])})
        if draw.random() < 0.2:
            messages = messages[: draw.randrange(1, len(messages) + 1)]
    return 1.0


class Speaker(Random):
    """Says letters, thoughts and calls of tools."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer, self.draw = tokenizer, random.Random(0)

    def generate(self, asked):
        found = []
        for one in asked:
            texts = [
                speakers.called("add", number=1),
                "<think>\nab\n</think>\n\nc<|im_end|>",
                "ab <|im_end|>",
                "<think>",
            ]
            text = self.draw.choice(texts) + ("" if self.draw.random() < 0.9 else "x")
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: one.limit]
            self.seen.setdefault(one.episode, []).append((one.context, ids))
            found.append((one, Sample(ids, [-0.5] * len(ids))))
        return found


def way(tree, turn):
    """A turn's last token and all before it in the tree."""
    place, found = max(i for i, author in enumerate(tree.turns) if author == turn), []
    while place >= 0:
        found.append(tree.ids[place])
        place = tree.parents[place]
    return tree.prompt[: len(tree.prompt) + 1 + place] + found[::-1]


def run_with_tools(hosts, todo, engine):
    tokenizer = speakers.tokenizer()
    reader = reader_of(tokenizer)

    def parsed(ids, context, tools):
        try:
            if tools:
                return parse_response(reader, ids, prefix=context, tools=list(tools))
        except Exception:
            pass
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}

    ends = frozenset([tokenizer.eos_token_id])
    limits = EpisodeLimits(completion=20_000, counts_all=True, context=None, ends=ends)
    return EpisodeLoop(engine, hosts, Renderer(tokenizer, {}), parsed, limits).run(todo), engine


def test_each_sampled_id_is_trained_once_where_it_was_sampled(hosts):
    todo = tasks(spec(wanders), [{"place": i} for i in range(EPISODES)])
    made, engine = run_with_tools(hosts, todo, Speaker(speakers.tokenizer()))
    branches = Counter()
    for number, (trajectory, _) in enumerate(made):
        assert trajectory.failure is None
        assert [(turn.context, turn.sampled) for turn in trajectory.turns] == engine.seen[number]
        tree = trajectory.tree
        trained = [token for token, turn in zip(tree.ids, tree.turns, strict=True) if turn >= 0]
        assert trained == [token for _, ids in engine.seen[number] for token in ids]
        for k, turn in enumerate(trajectory.turns):
            assert way(tree, k) == turn.context + turn.sampled
        branches[len(trajectory.rows())] += 1
    assert {1, 2, 3} <= set(branches)
    assert sum(figures.calls for _, figures in made) > EPISODES // 10


class Says(Speaker):
    def __init__(self, text):
        super().__init__(speakers.tokenizer())
        self.text = text

    def generate(self, asked):
        ids = self.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        return [(one, Sample(ids, [-0.5] * len(ids))) for one in asked]


async def stops(row, client):
    made = await client.chat.completions.create(model="m", messages=GO, tools=TOOLS, stop=["END"])
    [choice], message = made.choices, made.choices[0].message
    assert (choice.finish_reason, message.content, message.reasoning_content) == ("tool_calls", "ok", "hm")
    assert [call.function.arguments for call in message.tool_calls] == ['{"number": 1}']
    url, http = str(client.base_url).removesuffix("/v1/"), anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=client.api_key, http_client=http) as other:
        made = await other.messages.create(model="m", max_tokens=99, messages=GO, stop_sequences=["END", "hm"])
        assert (made.stop_reason, made.stop_sequence, made.content[0].text) == ("stop_sequence", "hm", "<think>\n")
    return 1.0


def test_calls_and_thinking_before_a_stop_text_are_kept(hosts):
    said = (
        f"<think>\nhm\n</think>\n\nok {speakers.called('add', number=1).removesuffix('<|im_end|>')}END more<|im_end|>"
    )
    [(made, _)], _ = run_with_tools(hosts, tasks(spec(stops), [{}]), Says(said))
    assert (made.failure, made.reward, len(made.turns)) == (None, 1.0, 2)


# Commands, and faults.

CLIENT = """
import json, os, sys, urllib.request
def ask(*texts):
    messages = [{"role": "user", "content": text} for text in texts]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def command(program, **kwargs):
    """A program in Python as an agent, which asks by `ask`."""
    options = {"run": ["python3", "-c", CLIENT + program, "{prompt}", "{word}"], **kwargs}
    return spec("command", kwargs=options)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("program", "kwargs", "reward"),
    [
        ("assert ask(sys.argv[1]); assert sys.argv[1:] == ['go', 'w']", {}, 1.0),
        ("ask('a'); sys.exit(3)", {}, 0.0),
        ("ask('a'); open('answer', 'w').write('w')", {"test": ["grep", "-q", "{word}", "answer"]}, 1.0),
        ("ask('a'); open('answer', 'w').write('v')", {"test": ["grep", "-q", "{word}", "answer"]}, 0.0),
        ("ask('a'); open('reward.txt', 'w').write('0.25')", {"reward": "file"}, 0.25),
        ("ask(open('task').read())", {"reward": "none", "files": {"task": "a {word}"}}, None),
    ],
)
def test_a_command_is_paid_by_its_status_a_file_or_a_test(hosts, program, kwargs, reward):
    [made], _ = run(hosts, tasks(command(program, **kwargs), [{"prompt": GO, "word": "w"}]))
    assert made.failure is None
    assert (made.reward, len(made.turns)) == (reward, 1)


FAULTS = {
    "ask('a'); print('so far', flush=True); os.kill(os.getpid(), 9)": "raised: run: .*was killed by SIGKILL. so far",
    "ask('a'); os.kill(os.getppid(), 9)": "raised: run: .*was killed by SIGKILL",
    "import time; ask('a'); print('so far', flush=True); time.sleep(3600)": "timeout: .*within 3 s",
    "print('I say no'); sys.exit(1)": "raised: run: it ended without an answer of the model. I say no",
}


def test_a_fault_costs_its_own_episode_only(hosts):
    programs = ["ask('a')", *FAULTS, "ask('a')"]
    todo = []
    for i, program in enumerate(programs):
        seconds = 3.0 if "sleep" in program else PATIENCE
        options = {"run": ["python3", "-c", CLIENT + program]}
        todo += tasks(spec("command", name=f"agent {i}", kwargs=options, turn_timeout=seconds), [{}])
    made, _ = run(hosts, todo)
    expected = [None, *FAULTS.values(), None]
    for trajectory, pattern in zip(made, expected, strict=True):
        if pattern is None:
            assert (trajectory.failure, trajectory.reward) == (None, 1.0)
        else:
            assert trajectory.reward is None
            assert re.match(pattern, trajectory.failure), trajectory.failure
    assert [one.output for one in made] == ["", "so far", "", "so far", "I say no", ""]
    assert [one.status for one in made] == [0, None, None, None, 1, 0]


def test_the_end_of_what_an_agent_and_its_test_print_is_kept_without_keys(hosts):
    program = "ask('a'); print('x' * 3000); print('\\x1b[31mkey', os.environ['OPENAI_API_KEY']); assert not 'crashed'"
    given = command(program, test=["sh", "-c", "printf 'one\\ntwo'; echo 1 > reward.txt"], reward="file")
    [made], _ = run(hosts, tasks(given, [{"prompt": GO, "word": "w"}]))
    assert (made.failure, made.reward, made.status) == (None, 1.0, 1)
    agent, test = made.output.split("\n--- test ---\n")
    assert agent.startswith("xxx")
    assert "\nkey (its key)\nTraceback" in agent
    assert agent.endswith("AssertionError")
    assert (len(agent) < 2000, test) == (True, "one\ntwo")


def test_each_fault_of_an_agent_costs_its_own_episode_and_leaves_nothing(hosts):
    faults = [None, *agents.FAULTS, None]
    todo = agent_runs.faulty(faults)
    usual, _ = run(hosts, [replace(task, row={"fault": None}) for task in todo])
    descriptors = psutil.Process().num_fds()
    made, _ = run(hosts, todo)
    for fault, one, expected in zip(faults, made, usual, strict=True):
        if fault is None:
            assert (one.failure, one.reward) == (None, 1.0)
            assert [turn.sampled for turn in one.turns] == [turn.sampled for turn in expected.turns]
        else:
            assert one.lost
            assert re.match(agents.FAULTS[fault], one.failure), one.failure
            assert "\n" not in one.failure
    assert not hosts.endpoint._lines
    deadline = time.monotonic() + PATIENCE
    while psutil.Process().num_fds() > descriptors and time.monotonic() < deadline:
        time.sleep(0.05)
    assert psutil.Process().num_fds() <= descriptors


def test_two_environments_of_one_name_have_their_own_options(hosts):
    path = f"{agents.__file__}:pays"
    both = [Task(spec(path, name="one", kwargs={"reward": reward}), {}, GO, None, seed=0) for reward in (0.25, 0.5)]
    made, _ = run(hosts, both)
    assert [one.reward for one in made] == [0.25, 0.5]


def test_branches_are_shown_where_they_leave_the_conversation(hosts):
    [made], _ = run(hosts, tasks(spec(agents.branches), [{"prompt": GO}]), Alphabet())
    assert made.failure is None
    said = "a b c d e f"
    assert [message["role"] for message in made.messages] == ["assistant", "user", "assistant"]
    assert made.branches == (
        f"--- branch 1: after message 0 of prompt and completion ---\n\n[user]\nsub:\n\n[assistant]\n{said}\n\n"
        f"--- branch 2: after message 2 of prompt and completion ---\n\n[user]\non\n\n[assistant]\n{said}"
    )


LEFT = []


async def misbehaves(row, client):
    """Sends what no client should; returns the statuses."""
    url, key = str(client.base_url).rstrip("/"), client.api_key
    good = {"Authorization": f"Bearer {key}"}
    ask = json.dumps({"messages": GO})
    number = int(url.split("/")[-2])
    bodies = [
        (url, {}, ask, 401),
        (url, {"Authorization": "Bearer nope"}, ask, 401),
        (url, {"Authorization": "Bearer \u00e9".encode()}, ask, 401),
        (url.replace(f"/{number}/", "/999/"), good, ask, 401),
        (url.replace(f"/{number}/", "/0/"), good, ask, 401),
        (url, good, "{", 400),
        (url, good, "[" * 1000, 400),
        (url, good, "[]", 400),
        (url, good, json.dumps({"messages": []}), 400),
        (url, good, json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), 400),
        (url, good, json.dumps({"messages": [{"role": "nobody", "content": "a"}], "n": 0}), 400),
        (url, good, json.dumps({"messages": GO, "pad": "x" * 2**24}), 413),
        (url, {"x-api-key": key}, ask, 200),
    ]
    async with httpx.AsyncClient(timeout=None) as plain:
        for address, headers, body, status in bodies:
            got = await plain.post(f"{address}/chat/completions", headers=headers, content=body)
            assert got.status_code == status, (body[:80], got.text)
            assert status == 200 or got.json()["error"]["message"]
        assert (await plain.get(f"{url}/models", headers=good)).json()["data"][0]["id"] == "policy"
        sending = {"messages": GO, "stream": True}
        async with plain.stream("POST", f"{url}/chat/completions", headers=good, json=sending) as stream:
            async for _ in stream.aiter_raw():
                break  # gone in the middle of a stream
    LEFT.append((url, good))
    return 1.0


def test_what_may_not_be_asked_is_refused_and_the_episode_goes_on(hosts):
    LEFT.clear()
    [made], _ = run(hosts, tasks(spec(misbehaves), [{}]))
    assert made.failure is None
    assert len(made.turns) == 2
    [(url, good)] = LEFT
    got = httpx.post(f"{url}/chat/completions", headers=good, json={"messages": GO})
    assert (got.status_code, got.json()["error"]["code"]) == (410, "episode_ended")
    assert url.startswith("http://127.0.0.1:")


def test_an_agent_that_leaves_while_it_is_answered_is_over(hosts):
    """It asks in a thread, and ends before the answer."""
    program = "import threading; ask('a'); threading.Thread(target=ask, args=('b',), daemon=True).start(); os._exit(0)"
    made, _ = run(hosts, tasks(command(program), [{"prompt": GO, "word": "w"}] * 3))
    assert [(t.failure, t.reward) for t in made] == [(None, 1.0)] * 3
