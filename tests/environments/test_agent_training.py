"""Training with agents: a tiny model, real programs and functions over OpenAI's client, real steps."""

import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.commands.sample import sample
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.environments.endpoint.server import Endpoint
from grpo_ext.environments.library.command import Command
from grpo_ext.environments.protocol import AgentTask
from grpo_ext.errors import ConfigError, EpisodesFailed
from grpo_ext.evaluation.evaluate import evaluate
from grpo_ext.trainer.diagnosis.rules import diagnose
from support import agents, tiny

AGENT = """
import sys
import openai

client = openai.OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "on"}]
print(answer)
sys.exit(len(answer) % 2)
"""
FUNCTION = """
async def agent(row, client, most):
    made = await client.chat.completions.create(model="policy", messages=row["prompt"])
    return min(most, len(made.choices[0].message.content) / 10)
"""


class Recorder(GRPOExtTrainer):
    def _generate_and_score_completions(self, inputs):
        self.output = super()._generate_and_score_completions(inputs)
        return self.output

    def _calculate_rewards(self, inputs, *completed):
        self.attempts = [row.get("trajectory") for row in inputs]
        return super()._calculate_rewards(inputs, *completed)


def trainer_of(folder, entry, **settings):
    args = GRPOExtConfig(
        output_dir=str(folder), **(tiny.TRAINING | {"max_completion_length": 60, "max_steps": 2} | settings)
    )
    data = [{"prompt": [{"role": "user", "content": f"guess {i}:"}]} for i in range(16)]
    return Recorder(tiny.model(), None, args, data, processing_class=tiny.tokenizer(), environments=[entry])


def trained(*given, **settings):
    made = trainer_of(*given, **settings)
    made.train()
    return made


def check(made, name, version=1):
    assert made.state.global_step == 2
    for row, episode in enumerate(made.episodes):
        assert episode.failure is None
        active = (made.output["completion_mask"] * made.output["tool_mask"])[row].bool()
        assert made.output["completion_ids"][row][active].tolist() == [i for t in episode.turns for i in t.sampled]
        assert episode.turns[0].version == version
    log = made.state.log_history[0]
    assert log[f"environments/{name}/failed"] == 0
    assert log[f"environments/{name}/turns"] >= 1
    assert log["rewards/environment/mean"] == pytest.approx(log[f"environments/{name}/reward"], abs=1e-6)


@pytest.mark.parametrize(
    ("engine", "ahead"),
    [
        ("transformers", 0),
        pytest.param("process", 0, marks=pytest.mark.slow),  # which starts a process
        pytest.param("process", 1, marks=pytest.mark.slow),
    ],
)
def test_a_function_by_path_is_trained(engine, ahead, tmp_path):
    (tmp_path / "my_agent.py").write_text(FUNCTION)
    entry = {"path": f"{tmp_path}/my_agent.py:agent", "kwargs": {"most": 2.0}}
    settings = {"rollout_engine": engine, "rollout_ahead": ahead} if engine == "process" else {}
    check(trained(tmp_path / "run", entry, **settings), "agent", version=1 - ahead)


@pytest.mark.slow
def test_the_table_of_completions_has_the_branches(tmp_path):
    entry = {"path": f"{agents.__file__}:branches"}
    made = trained(tmp_path, entry, max_steps=1, log_completions=True, num_completions_to_print=0)
    shown = list(made._logs["extra"]["branches"])
    assert len(shown) == len(made.episodes)
    for text, episode in zip(shown, made.episodes, strict=True):
        assert text == episode.branches
        assert "--- branch 1: after message 0 of prompt and completion ---\n\n[user]\nsub:" in text


def test_an_evaluation_and_a_sample_have_the_branches(tmp_path):
    made = trainer_of(tmp_path, {"path": f"{agents.__file__}:branches"}, num_generations_eval=2)
    rows = [{"prompt": [{"role": "user", "content": f"guess {i}:"}]} for i in range(2)]
    kept = tmp_path / "samples.jsonl"
    evaluate(made, EvalSet("held", samples=2, plays=True, seed=5), rows, kept=kept, identity={}, workers=0)
    made.model.eval()
    sampled = [row for rows in islice(sample(made, 2, 2), 2) for row in rows]
    made.close_rewards()
    evaluated = [one for line in kept.read_text().splitlines()[1:] for one in json.loads(line)["samples"]]
    for one in (*evaluated, *sampled):
        assert one["completion"][-1]["role"] == "assistant"
        assert "--- branch 1: after message 0 of prompt and completion ---\n\n[user]\nsub:" in one["branches"]
    assert (len(evaluated), len(sampled)) == (4, 4)


CRASHES = """
import json, os, sys, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
print(undefined)
"""


def test_the_first_crash_of_a_program_is_shown_once_and_all_are_counted_and_kept(tmp_path, caplog):
    entry = {"name": "command", "kwargs": {"run": [sys.executable, "-c", CRASHES]}}
    settings = {"per_device_train_batch_size": 4, "num_generations": 4}
    made = trained(tmp_path, entry, log_completions=True, num_completions_to_print=0, **settings)
    (line,) = [text for text in caplog.messages if "ended with a nonzero status" in text]
    assert "of 4 programs or tests 4 ended with a nonzero status (4 with 1)" in line
    assert line.endswith("NameError: name 'undefined' is not defined")
    assert [row["environments/command/nonzero_exit"] for row in made.state.log_history[:2]] == [1.0, 1.0]
    assert all(text.endswith("is not defined") for text in made._logs["extra"]["output"])
    assert [finding.rule.name for finding in diagnose(made.state.log_history)][:1] == ["agent fails"]


@pytest.mark.slow
def test_a_run_stops_when_every_episode_has_failed_for_long(tmp_path):
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 20}
    entry = {"path": f"{agents.__file__}:never"}
    made = trainer_of(tmp_path / "lost", entry, **settings)
    with pytest.raises(EpisodesFailed, match=r"every episode of 5 generations in a row.*no world.*resume"):
        made.train()
    assert made.state.global_step == 4
    made = trained(tmp_path / "paid", entry | {"on_error": 0.0}, **settings | {"max_steps": 6})
    assert made.state.global_step == 6


@pytest.mark.slow  # each episode imports the client
def test_a_program_is_trained_and_its_key_is_in_no_file(tmp_path, monkeypatch):
    keys, made_of = set(), Endpoint._key
    monkeypatch.setattr(
        Endpoint, "_key", lambda self, number: keys.add(made_of(self, number)) or made_of(self, number)
    )
    (tmp_path / "agent.py").write_text(AGENT)
    entry = {"name": "command", "kwargs": {"run": [sys.executable, str(tmp_path / "agent.py"), "{prompt}"]}}
    made = trained(tmp_path / "run", entry, log_completions=True, num_completions_to_print=0)
    check(made, "command")
    assert len(keys) >= 16
    texts = [path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()]
    assert texts
    assert not any(key.encode() in text for key in keys for text in texts)


def test_a_command_knows_its_folder_and_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = """
import os, sys
folder = sys.argv[1]
assert os.environ["PWD"] == os.getcwd() == folder
assert os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:1/1/v1"
open("seen", "w").write(open(os.environ["HOME"] + "/deep/note").read())
"""
    made = Command(
        run=[sys.executable, "-c", program, "{folder}"],
        test=["grep", "-x", "17 {braces} {url}", "{folder}/seen"],
        env={"HOME": "{folder}"},
        files={"deep/note": "{n} {braces} {url}"},
    )
    assert made.run(AgentTask({"n": 17}, "http://127.0.0.1:1/1", "key")) == 1.0
    assert made.output == "17 {braces} http://127.0.0.1:1/1/v1"
    assert [path.parent.parent for path in tmp_path.rglob("seen")] == [tmp_path]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "command", "kwargs": {"run": "python agent.py"}}, "not a list of texts"),
        ({"name": "command", "kwargs": {"run": ["a"], "reward": "luck"}}, "not a kind of reward"),
        ({"name": "command", "kwargs": {"run": ["a"], "files": {"../a": "b"}}}, "leaves the episode's folder"),
        ({"name": "command", "kwargs": {"run": ["a"], "reward": "none"}}, "no source of rewards"),
        ({"path": f"{__file__}:check"}, "nor an async function"),
    ],
)
def test_what_cannot_be_an_agent_is_refused(entry, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        trained(tmp_path, entry)


def test_a_missing_package_is_named_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_ext.environments.composition.missing", lambda: "uvicorn")
    with pytest.raises(ConfigError, match=r"uvicorn is not installed.*grpo-ext\[agents\]"):
        trained(tmp_path, {"name": "command", "kwargs": {"run": ["a"]}})
