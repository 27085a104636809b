"""Any program that speaks to a model through OpenAI's protocol, as an agent."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo_ext.child_processes import describe_exit
from grpo_ext.environments.protocol import Agent, AgentTask, environments
from grpo_ext.errors import Problem
from grpo_ext.rewards.text import completion_text

_TAIL = 2000
"""Characters of the output that a failure shows."""
_PLACE = re.compile(r"\{(\w+)\}")


class CommandFailed(RuntimeError):
    """A command of an attempt failed; the message has the end of its output."""


@environments.register("command")
class Command(Agent):
    """Run a program in a folder of its own, with OPENAI_BASE_URL and OPENAI_API_KEY of its attempt.

    In `run`, `test`, `env` and `files`, `{prompt}` is the text of the prompt's last message, `{column}` the row's
    column, `{folder}` the folder and `{url}` OPENAI_BASE_URL. `reward` is "exit" (1 if `test`, or without it the
    program, ends with status 0, else 0), "file" (the number in `reward_file`) or "none". `files` are written into the
    folder first.
    """

    def __init__(
        self,
        run: Sequence[str],
        reward: Literal["exit", "file", "none"] = "exit",
        test: Sequence[str] | None = None,
        reward_file: str = "reward.txt",
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self._run, self._reward, self._test, self._file = list(run), reward, list(test or ()), reward_file
        self._env, self._files = dict(env or {}), dict(files or {})

    @staticmethod
    def pays(options: Mapping[str, Any]) -> bool:
        """Return whether it has a reward."""
        return options.get("reward") != "none"

    @staticmethod
    def option_problems(
        run: object, reward: str = "exit", test: object = None, files: object = None, **_: object
    ) -> Iterator[Problem]:
        """Yield commands that are not lists of texts, and an unknown reward."""
        for name, value in (("run", run), ("test", test)):
            listed = isinstance(value, list | tuple) and value and all(isinstance(part, str) for part in value)
            if not listed and (name == "run" or value is not None):
                yield Problem(
                    name, value, "not a list of texts", "Write the program and its arguments: [python, a.py]."
                )
        if reward not in ("exit", "file", "none"):
            yield Problem("reward", reward, "not a kind of reward", "Set exit, file or none.")
        if any(
            Path(name).is_absolute() or ".." in Path(name).parts for name in (files if isinstance(files, dict) else ())
        ):
            yield Problem("files", files, "a path that leaves the attempt's folder", "Name files inside it.")

    def run(self, task: AgentTask) -> float | None:
        """Run the program, then the test; return the reward."""
        folder = Path(tempfile.mkdtemp())
        row = {**task.row, "folder": str(folder), "url": f"{task.url}/v1"}
        own = {name: filled(value, row) for name, value in self._env.items()}
        for name, text in self._files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(filled(text, row))
        status = self._status(self._run, row, folder, {**model_variables(task), **own})
        if status and self._reward == "none":
            raise CommandFailed(f"{self._run[0]} ended with exit status {status}. {self.output}")
        if self._test:
            status = self._status(self._test, row, folder, own)
        if self._reward == "exit":
            return float(status == 0)
        return self._number(folder) if self._reward == "file" else None

    def _status(self, command: Sequence[str], row: Mapping[str, Any], folder: Path, own: Mapping[str, str]) -> int:
        """Run a command to its end. Return its exit status.

        Raises:
            CommandFailed: it cannot be started, or a signal ended it.
        """
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # that is ours
        inherited["PWD"] = str(folder)  # which some programs trust more than their working directory
        arguments = [filled(part, row) for part in command]
        with tempfile.TemporaryFile() as log:
            try:
                done = subprocess.run(
                    arguments,
                    cwd=folder,
                    env={**inherited, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            except OSError as error:
                raise CommandFailed(
                    f"{arguments[0]!r} cannot be started ({error.strerror}). Correct the path."
                ) from None
            log.seek(max(0, log.tell() - _TAIL))
            self.output = log.read().decode(errors="replace").strip()
        if done.returncode < 0:
            raise CommandFailed(f"{arguments[0]}: {describe_exit(done.returncode)}. {self.output}")
        return done.returncode

    def _number(self, folder: Path) -> float:
        try:
            with (folder / self._file).open() as file:
                return float(file.read(1000))
        except (OSError, ValueError) as error:
            raise CommandFailed(f"no number in reward_file={self._file} ({error}). {self.output}") from None


def model_variables(task: AgentTask) -> dict[str, str]:
    """Return the variables by which clients find the model."""
    addresses = {"OPENAI_BASE_URL": f"{task.url}/v1", "ANTHROPIC_BASE_URL": task.url}
    keys = {"OPENAI_API_KEY": task.key, "ANTHROPIC_API_KEY": task.key}
    return {**addresses, **keys, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def filled(text: str, row: Mapping[str, Any]) -> str:
    """Return a text with `{prompt}` and the row's columns filled in; other braces stay."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "prompt" and isinstance(row.get("prompt"), list):
            return completion_text([{"content": row["prompt"][-1].get("content")}])
        return str(row[match[1]]) if match[1] in row else match[0]

    return _PLACE.sub(value, text)
