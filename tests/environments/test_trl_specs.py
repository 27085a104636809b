"""TRL's specs of Harbor and OpenReward, with a sandbox and a server that stand in, on TRL's trainer and ours."""

import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from trl import GRPOConfig
from trl.experimental.harbor import HarborBashEnv, HarborSpec
from trl.experimental.openreward import OpenRewardSpec

from grpo_ext import GRPOExtConfig
from support import speakers, tiny


class Local(HarborBashEnv):
    """A folder in place of Harbor's sandbox, and the task's own script as its verifier."""

    async def _start(self, task_dir):
        self._task, self._env = Path(task_dir), tempfile.mkdtemp()
        return (self._task / "instruction.md").read_text()

    def _exec(self, command, timeout=180):
        done = subprocess.run(["bash", "-c", command], cwd=self._env, capture_output=True, text=True)
        return done.stdout or f"(empty output, rc={done.returncode})"

    async def _verify(self):
        return float(subprocess.run(["bash", self._task / "tests" / "test.sh"], cwd=self._env).returncode == 0)

    async def _stop(self):
        self._env = None


def harbor(folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for number in range(2):
        task = folder / "tasks" / f"sum-{number}"
        (task / "tests").mkdir(parents=True)
        (task / "instruction.md").write_text(f"What is 40 + {number}?")
        (task / "task.toml").write_text(f"[metadata]\ngold_answer = '{40 + number}'\n")
        (task / "tests" / "test.sh").write_text(f'[ "$(cat answer.txt)" = {40 + number} ]\n')
    calls = [speakers.called("bash", command=f"echo {answer} > answer.txt") for answer in (40, 41)]
    return HarborSpec(str(folder), agent=Local, include_metadata=False), calls


class Server:
    """An environment of OpenReward's client: a tool that is paid for the task's number."""

    server = namespace = None
    name = "env"

    def list_tools(self):
        number = {"type": "integer", "description": "The sum."}
        schema = {"properties": {"number": number}, "required": ["number"]}
        return [SimpleNamespace(name="submit", description="Submit a number.", input_schema=schema)]

    def num_tasks(self, split):
        return 2

    def list_tasks(self, split):
        return [SimpleNamespace(task_spec={}) for _ in range(2)]

    @contextmanager
    def session(self, split, index, secrets):
        def call_tool(name, given):
            blocks = [SimpleNamespace(type="text", text="noted")]
            reward = float(given["number"] == 40 + index)
            return SimpleNamespace(blocks=blocks, reward=reward, metadata=None, finished=True)

        prompt = [SimpleNamespace(type="text", text=f"What is 40 + {index}?")]
        yield SimpleNamespace(list_tools=self.list_tools, call_tool=call_tool, get_prompt=lambda: prompt)


def openreward(folder, monkeypatch):
    package = ModuleType("openreward")
    package.OpenReward = lambda base_url: SimpleNamespace(environments={"env": Server()})
    monkeypatch.setitem(sys.modules, "openreward", package)
    calls = [speakers.called("submit", number=answer) for answer in (40, 41)]
    return OpenRewardSpec("http://127.0.0.1:1"), calls


@pytest.mark.parametrize("made", [harbor, openreward])
def test_a_spec_of_trls_plays_and_pays_as_in_trl(made, tmp_path, monkeypatch):
    spec, calls = made(tmp_path, monkeypatch)
    script = [lambda i: calls[i % 2], lambda i: "done<|im_end|>"]
    settings = tiny.TRAINING | {"max_completion_length": 1000, "max_steps": 1, "shuffle_dataset": False}
    tokenizer, outputs, paid = speakers.tokenizer(), [], []
    for kind, config in ((speakers.Stock, GRPOConfig), (speakers.Ours, GRPOExtConfig)):
        trainer = type("Scripted", (kind,), {"script": script})(
            speakers.model(tokenizer),
            spec.reward_funcs,
            config(str(tmp_path / "run"), **settings),
            spec.train_dataset,
            processing_class=tokenizer,
            environment_factory=spec.environment_factory,
        )
        inputs = [dict(trainer.train_dataset[i // 4]) for i in range(8)]
        outputs.append(trainer._generate_and_score_completions(inputs))
        paid.append(list(trainer._logs["rewards"][trainer.reward_func_names[0]]))
    assert paid[0] == paid[1] == [1, 0, 1, 0, 0, 1, 0, 1]
    for name in ("prompt_ids", "completion_ids", "tool_mask"):
        assert torch.equal(outputs[0][name], outputs[1][name]), name
    assert "What is 40 + 1?" in tokenizer.decode(outputs[1]["prompt_ids"][7])
