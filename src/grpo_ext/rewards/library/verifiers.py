"""The reward `reasoning_gym`: verifiers that compare run here, those that evaluate the answer in a sandbox."""

import copy
import functools
import inspect
import json
import logging
import math
import platform
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from grpo_ext.errors import Problem
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.code import sandbox
from grpo_ext.rewards.code.seccomp import MACHINES, bpf_filter
from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import Completion, answer_block, completion_text

logger = logging.getLogger(__name__)

Entry: TypeAlias = dict[str, Any]
CPU_SECONDS = 5
"""Limit of a verdict in the sandbox."""
_NUMBER = re.compile(r"[-+]?\d{1,30}(?:\.\d{1,30}|/0*[1-9]\d{0,29})?")
_EVALUATES = re.compile(
    r"\b(?:eval|exec|literal_eval|parse_expr|sympify|Fraction|__import__|import_module)\("
    r"|\b(?:magiccube|perform_moves|pickle|subprocess)\b"
)
"""In the source of a verifier: what executes a text, or computes it however long that takes."""


@rewards.register("reasoning_gym", independent=True)
def reasoning_gym(
    completions: list[Completion], reasoning_gym_entry: list[str | None], *, extract: str = "answer", **_: object
) -> list[float | None]:
    """Score in [0, 1] by the task's own verifier in reasoning-gym (arXiv:2505.24760).

    `reasoning_gym_entry` is the JSON of the task's entry (question, answer, metadata). `extract` selects the text:
    "answer" (content of `<answer>`, else the whole text), "text" (the whole text), "last_line" (last non-empty line).
    Three tasks whose verifiers pay a constant for every entry (`coin_flip`, `game_of_life`, `game_of_life_halting`)
    compare exactly, and `puzzle24` compares the numbers too. A verifier that evaluates the answer does so in the
    sandbox of the reward `code`, in a process for each verdict.
    0.0: the verifier fails on the answer, or needs more than 5 seconds in the sandbox.
    None: the entry is missing or unreadable, its task unknown, or the verifier fails on the entry's own answer too.

    Raises:
        ValueError: unknown `extract`. ImportError: reasoning-gym is not installed. SandboxError: this machine cannot
        contain a verifier that evaluates the answer.
    """
    _extracted("", extract)  # an unknown option is an error even for an empty batch
    answers = [_extracted(completion_text(completion), extract) for completion in completions]
    entries = {i: entry for i, text in enumerate(reasoning_gym_entry) if text is not None and (entry := _read(text))}
    scores = dict(zip(entries, _scores([(answers[i], entry) for i, entry in entries.items()]), strict=True))
    failed = [i for i, score in scores.items() if score is None]
    for i, score in zip(failed, _scores([(known_answer(entries[i]), entries[i]) for i in failed]), strict=True):
        scores[i] = None if score is None else 0.0
    for i, text in enumerate(reasoning_gym_entry):
        if text is not None and scores.get(i) is None:
            logger.warning("reasoning_gym cannot score any answer against %.80r", text)
    return [scores.get(i) for i in range(len(answers))]


def _extracted(text: str, extract: str) -> str:
    if extract == "answer":
        block = answer_block(text)
        return text.strip() if block is None else block
    if extract == "text":
        return text.strip()
    if extract == "last_line":
        return (text.strip().splitlines() or [""])[-1].strip()
    raise OptionError("extract", extract, "unknown", did_you_mean(str(extract), ("answer", "text", "last_line")))


def _read(text: str) -> Entry | None:
    """Return an entry of a known task."""
    try:
        entry: Entry = copy.deepcopy(json.loads(text))  # which is stricter about depth than JSON, written again below
        return entry if _task(entry) in _datasets() else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _task(entry: Entry) -> str:
    return entry["metadata"]["source_dataset"]


def known_answer(entry: Entry) -> str | None:
    """Return the answer, or the example that tasks with many right answers put into their metadata."""
    metadata = entry["metadata"]
    for answer in (entry.get("answer"), metadata.get("example_answer"), metadata.get("example_correct_answer")):
        if answer is not None:
            return answer
    return json.dumps(metadata["possible_answer"]) if "possible_answer" in metadata else None


def _datasets() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("reward 'reasoning_gym' needs reasoning-gym: pip install 'grpo-ext[tasks]'.") from error
    return DATASETS


@functools.cache
def needs_sandbox(task: str) -> bool:
    """Return whether the verifier of a task evaluates the answer or the entry, by the source of its module."""
    return task not in _EXACT and bool(
        _EVALUATES.search(inspect.getsource(sys.modules[_datasets()[task][0].score_answer.__module__]))
    )


def refusal(task: str) -> list[Problem]:
    """Return why this machine cannot score answers to a task."""
    try:
        if needs_sandbox(task):
            sandbox.available()
    except sandbox.SandboxError as error:
        reason = f"its verifier evaluates what the model answers, which needs a sandbox: {error!s:.500}"
        return [Problem("dataset_name", f"reasoning_gym/{task}", reason, "Choose another task, or another machine.")]
    return []


@functools.cache  # some tasks read their data from disk each time
def verifier(task: str) -> Callable[..., float]:
    """Return the verifier of a task, which takes `answer` and `entry`."""
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


def _scores(rows: Sequence[tuple[str | None, Entry]]) -> list[float | None]:
    """Return the verdicts about (answer, entry); None where the verifier fails."""
    wrong = {i for i, (answer, entry) in enumerate(rows) if _has_other_numbers(answer, entry)}
    inside = [i for i, (_, entry) in enumerate(rows) if i not in wrong and needs_sandbox(_task(entry))]
    numbers = dict(zip(inside, _contained([rows[i] for i in inside]), strict=True)) if inside else {}
    return [
        0.0 if i in wrong else _bounded(float, numbers[i]) if i in numbers else _bounded(_compared, answer, entry)
        for i, (answer, entry) in enumerate(rows)
    ]


def _has_other_numbers(answer: str | None, entry: Entry) -> bool:
    """Return whether an answer to `puzzle24` has not the entry's numbers, which its verifier does not compare."""
    if _task(entry) != "puzzle24" or answer is None:
        return False
    return sorted(re.findall(r"\d+", answer)) != sorted(map(str, entry["metadata"].get("numbers", ())))


def _bounded(score: Callable[..., float], *arguments: Any) -> float | None:
    try:
        value = float(score(*arguments))
    except Exception:  # a verifier may raise anything
        return None
    return min(1.0, max(0.0, value)) if math.isfinite(value) else None


def _same_number(answer: str, right: str) -> bool:
    numbers = [Fraction(text.strip()) for text in (answer, right) if _NUMBER.fullmatch(text.strip())]
    return len(numbers) == 2 and abs(numbers[0] - numbers[1]) <= Fraction(1, 10_000)


# Tasks whose own verifiers pay one constant for every entry: a common prefix of digits counts, or the share of cells
# of a grid that is mostly empty, or any text is true. There an answer is right or wrong.
_EXACT: dict[str, Callable[[str, str], bool]] = {
    "coin_flip": _same_number,
    "game_of_life": lambda answer, right: json.loads(answer) == json.loads(right),
    "game_of_life_halting": lambda answer, right: answer.strip().casefold() == right.strip().casefold(),
}


def _compared(answer: str | None, entry: Entry) -> float:
    if exact := _EXACT.get(_task(entry)):
        return float(answer is not None and exact(answer, entry["answer"]))
    entry = copy.deepcopy(entry)  # some verifiers write into it
    if _task(entry) == "complex_arithmetic" and answer is not None and "nan" in answer.lower():
        return 0.0  # at no distance from any answer: min(1.0, nan) is 1.0
    if _task(entry) in ("arc_agi", "rearc"):  # compared as tuples, which JSON has made lists
        entry["metadata"]["output"] = tuple(tuple(row) for row in entry["metadata"]["output"])
    return verifier(_task(entry))(answer=answer, entry=entry)


def _contained(rows: Sequence[tuple[str | None, Entry]]) -> list[str]:
    """Return the numbers that `verifier_child` writes about (answer, entry), in one sandbox."""
    method, machine = sandbox.available(), platform.machine()
    root = str(Path(inspect.getfile(sys.modules["reasoning_gym"])).resolve().parent)
    job = {
        "root": root,
        "modules": {task: _datasets()[task][0].__module__ for task in {_task(entry) for _, entry in rows}},
        "filter": bpf_filter(machine, isolated=False).hex() if machine in MACHINES else "",
        "cpu_seconds": CPU_SECONDS,
        "rows": [(_task(entry), answer, entry) for answer, entry in rows],
    }
    outcome = sandbox.run(
        Path(sandbox.__file__).with_name("verifier_child.py").read_text(),
        stdin=json.dumps(job),
        limits=sandbox.Limits(timeout=60.0 * (1 + len(rows)), memory_mb=4096, output_kb=64 + len(rows)),
        method=method,
        readable=(root,),
        packages=True,
        forks=True,
    )
    if not outcome.ok:
        reason = outcome.stopped or outcome.stderr.decode(errors="replace").strip()[-300:]
        raise sandbox.SandboxError(f"the verifiers of reasoning_gym do not run in the sandbox: {reason}")
    numbers: list[str] = json.loads(outcome.stdout)
    return numbers
