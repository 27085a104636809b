"""Any program that speaks to a model through OpenAI's protocol, as an agent."""

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any, Literal, TypeGuard

from grpo_ext.child_processes import Warded, describe_exit
from grpo_ext.environments.library.folder import Folder
from grpo_ext.environments.protocol import OUTPUTS, Agent, AgentTask, environments
from grpo_ext.errors import Problem
from grpo_ext.rewards.text import completion_text

_TAIL = 400
"""Bytes of the output that a failure shows."""
_KEPT = 4000
"""Bytes of the output that are kept."""
_READING_SECONDS = 1.0
_FILE = "reward.txt"
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]+")
"""Colours and other control characters."""
_PLACE = re.compile(r"\{(\w+)\}")


class CommandFailed(RuntimeError):
    """A command of an episode failed; the message has the end of its output."""


@environments.register("command")
class Command(Agent):
    """Run a program in a folder of its own, with OPENAI_BASE_URL and OPENAI_API_KEY of its episode.

    In all options but `reward`, `{prompt}` is the text of the prompt's last message, `{column}` the row's column,
    `{folder}` the folder and `{url}` OPENAI_BASE_URL. `reward` is "exit" (1 if `test`, or without it the
    program, ends with status 0, else 0), "file" (the number in `reward_file`) or "none". `files` are written into the
    folder first. Before `test` all that the program has started is killed, its `reward_file` is removed, and
    `test_files` are written in place of the program's; a test that ends with another status than 0 pays 0.
    """

    def __init__(
        self,
        run: Sequence[str],
        reward: Literal["exit", "file", "none"] = "exit",
        test: Sequence[str] | None = None,
        reward_file: str | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        test_files: Mapping[str, str] | None = None,
    ) -> None:
        self._run, self._reward, self._test, self._file = list(run), reward, list(test or ()), reward_file or _FILE
        self._env, self._files, self._test_files = dict(env or {}), dict(files or {}), dict(test_files or {})

    @staticmethod
    def pays(options: Mapping[str, Any]) -> bool:
        """Return whether it has a reward."""
        return options.get("reward") != "none"

    @staticmethod
    def option_problems(
        run: object,
        reward: object = "exit",
        test: object = None,
        reward_file: object = None,
        env: object = None,
        files: object = None,
        test_files: object = None,
    ) -> Iterator[Problem]:
        """Yield programs that are not there, and options of another type, without effect, or out of the folder."""
        for name, value in (("run", run), ("test", test)):
            if name == "test" and value is None:
                continue
            if not (isinstance(value, list | tuple) and value and all(isinstance(part, str) for part in value)):
                cure = "Write the program and its arguments: [python, a.py]."
                yield Problem(name, value, "not a list of texts", cure)
            elif not _is_program(value[0], env):
                yield Problem(name, value[0], "no such program", "Install it, or correct its path.")
        if reward not in ("exit", "file", "none"):
            yield Problem("reward", reward, "not a kind of reward", "Set exit, file or none.")
        for name, value in (("env", env), ("files", files), ("test_files", test_files)):
            if value is not None and not _texts(value):
                yield Problem(name, value, "not a mapping of texts to texts", "Put numbers in quotes.")
        if reward_file is not None and reward != "file":
            yield Problem("reward_file", reward_file, f"has no effect with reward: {reward}", "Set reward: file.")
        if test is not None and reward == "none":
            yield Problem("test", test, "pays nothing with reward: none", "Remove one of them.")
        if test_files and test is None:
            yield Problem("test_files", test_files, "written for test, which is not set", "Set test, or use files.")
        written: dict[str, object] = {"files": files, "test_files": test_files}
        named: dict[str, list[object]] = {name: [*texts] for name, texts in written.items() if _texts(texts)}
        for name, paths in {**named, "reward_file": [reward_file or _FILE]}.items():
            if not all(_inside(path) for path in paths):
                yield Problem(name, paths, "a path that leaves the episode's folder", "Name files inside it.")

    def run(self, task: AgentTask) -> float | None:
        """Run the program, then the test; return the reward."""
        with closing(Folder(Path(tempfile.mkdtemp()))) as folder:
            return self._paid(task, folder)

    def _paid(self, task: AgentTask, folder: Folder) -> float | None:
        row = {**task.row, "folder": str(folder.path), "url": f"{task.url}/v1"}
        own = {name: filled(value, row) for name, value in self._env.items()}
        for name, text in self._files.items():
            folder.write(name, filled(text, row))
        status = self._status(self._run, row, folder, {**model_variables(task), **own}, OUTPUTS[0])
        self.status = status
        if status < 0:
            raise CommandFailed(f"{self._run[0]}: {describe_exit(status)}. {self.output}")
        if status and self._reward == "none":
            raise CommandFailed(f"{self._run[0]} ended with exit status {status}. {self.output}")
        if self._test:
            self._prepare_test(row, folder)
            status = self._status(self._test, row, folder, own, OUTPUTS[1])
            self.status = self.status or status  # a test that crashes looks like a wrong answer
        if self._reward == "exit" or (self._test and status):
            return float(status == 0)
        return self._number(folder) if self._reward == "file" else None

    def _prepare_test(self, row: Mapping[str, Any], folder: Folder) -> None:
        """Take what the program has written as a reward or as a file of the test out of its folder."""
        if folder.replaced:
            raise CommandFailed(f"{self._run[0]} has put something else in place of its folder. {self.output}")
        try:
            if self._reward == "file":
                folder.remove(self._file)
            for name, text in self._test_files.items():
                folder.write(name, filled(text, row))
        except OSError as error:
            raise CommandFailed(f"{self._run[0]} keeps a file of the test from being replaced ({error}).") from None

    def _status(
        self, command: Sequence[str], row: Mapping[str, Any], folder: Folder, own: Mapping[str, str], output: str
    ) -> int:
        """Run a command to its end, and end all that it has started. Return its status, or minus its signal."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # that is ours
        inherited["PWD"] = str(folder.path)  # which some programs trust more than their working directory
        arguments = [filled(part, row) for part in command]
        path = Path(tempfile.gettempdir(), output)
        path.unlink(missing_ok=True)  # it may be a link that the program has put there
        log, printed = path.open("xb", 0), bytearray()
        started = Warded(arguments, cwd=folder.path, env={**inherited, **own}, stdout=PIPE, stderr=STDOUT)
        reader = threading.Thread(target=_keep, args=(started.process.stdout, printed, log), daemon=True)
        reader.start()
        status = started.process.wait()
        reader.join(_READING_SECONDS)  # what could not be ended may have it open
        self.output = " ".join(_CODES.sub(" ", printed[-_TAIL:].decode(errors="replace")).split())
        number, left = started.left()
        if number is not None:
            raise CommandFailed(f"{arguments[0]!r} cannot be started ({os.strerror(number)}).")
        if left:
            ended = describe_exit(status)
            raise CommandFailed(f"{arguments[0]}: {ended}, and what it had started could not be ended. {self.output}")
        return status

    def _number(self, folder: Folder) -> float:
        try:
            return float(folder.read(self._file, 1000))
        except (OSError, ValueError) as error:
            raise CommandFailed(f"no number in reward_file={self._file} ({error}). {self.output}") from None


def _is_program(program: str, env: object) -> bool:
    """Return whether a program is there, or is looked for in the episode only."""
    of_the_episode = _PLACE.search(program) or ("/" in program and not Path(program).is_absolute())
    return bool(of_the_episode or (isinstance(env, Mapping) and "PATH" in env) or shutil.which(program))


def _texts(value: object) -> TypeGuard[Mapping[str, str]]:
    return isinstance(value, Mapping) and all(isinstance(part, str) for pair in value.items() for part in pair)


def _inside(path: object) -> bool:
    """Return whether a value names something below a folder."""
    parts = Path(path).parts if isinstance(path, str) else ()
    return bool(parts) and not Path(str(path)).is_absolute() and ".." not in parts


def _keep(pipe: BufferedReader, printed: bytearray, log: FileIO) -> None:
    """Read what a program prints to its end. Keep the last of it in memory and in a file: it may print without end."""
    with pipe, log:
        while read := pipe.read1(2**16):
            printed += read
            del printed[:-_KEPT]
            with suppress(OSError):  # a full disk
                os.pwrite(log.fileno(), printed, 0)


def model_variables(task: AgentTask) -> dict[str, str]:
    """Return the variables by which clients find the model."""
    addresses = {"OPENAI_BASE_URL": f"{task.url}/v1", "ANTHROPIC_BASE_URL": task.url}
    keys = {"OPENAI_API_KEY": task.key, "ANTHROPIC_API_KEY": task.key}
    direct = {name: f"{os.environ.get(name) or ''},127.0.0.1".lstrip(",") for name in ("NO_PROXY", "no_proxy")}
    return {**addresses, **keys, **direct}


def filled(text: str, row: Mapping[str, Any]) -> str:
    """Return a text with `{prompt}` and the row's columns filled in; other braces stay."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "prompt" and isinstance(row.get("prompt"), list):
            return completion_text([{"content": row["prompt"][-1].get("content")}])
        return str(row[match[1]]) if match[1] in row else match[0]

    return _PLACE.sub(value, text)
