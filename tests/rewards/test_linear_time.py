"""The law of linear time: no text of up to 100 kB takes a reward, or a reader of texts, time beyond its length."""

import ast
import inspect
import io
import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest

from grpo_ext import errors, safe_reading, terminal
from grpo_ext.config import paths
from grpo_ext.data import json_rows
from grpo_ext.environments import rendering
from grpo_ext.environments.endpoint import chat, messages, requests, responses
from grpo_ext.environments.library import command, guess
from grpo_ext.rewards import text as texts
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.code import reward as code
from grpo_ext.rewards.library import (
    answers,
    baselines,
    choices,
    functions,
    lengths,
    math_copies,
    math_marks,
    math_notation,
    math_units,
    math_values,
    minimind,
)
from grpo_ext.rewards.models import remote
from support import tiny

LENGTH = 100_000
SECONDS = 2.0  # of the processor, for 100 kB, so that a busy machine fails nothing; all take less than a tenth of it
RATIO = 3.2  # of the time for 100 kB to that for 50 kB: 2 is linear, 4 quadratic
NOTICEABLE = 0.2  # seconds; a shorter time is noise, with the clock of a busy machine
SHORTER = 8  # by so much are the texts shorter of which the three slowest are found
MOST = 40  # texts of each kind for one reader
LONGEST = 60  # characters of a fragment

BEFORE_X = ("", "x")
FRAMES = [
    ("", ""), BEFORE_X, ("<think>\n", ""), ("<think>a</think><answer>", ""), ("<answer>", "</answer>"),
    ("answer is ", ""), ("answer", "x"), ("\\boxed{", ""), ("```json\n", ""), ('["', ""), ("#### 1", "\nx"),
]  # fmt: skip
"""What is written before and after what is repeated."""
COMMON = [
    "\n", " ", "\t \n", "<think>", "</think>", "<answer>", "</answer>", "<answer>\n", "`", "```", "```a\n",
    "```json\n", "#", "####", "#### 1 ", "{", "[", "}", "{}", "^{", "\\", "\\boxed{", "\\text{}", "\\frac{1}",
    "\\log_2 ", "\\(", "\\[", "\\\\($", "\\\\[$", "\\, ", "$", "$$", "$ ", "*", "**", "* ", "_", "9", "1", "1 ", "1,",
    "1.", "1/", "1-", "-", "-> ", "= ", "(", "1(", "<<", "<<>> ", "°", "é", "\u0300\u0316", "a", "a ", "word ",
    "answer", "answer is ", "option ", "Score:", "not ", "or ", "1 or ", ",not 1", "Step 1", "!",
]  # fmt: skip
JUDGE = partial(re.findall, remote.JUDGE_PATTERN)
SCHEMAS = {
    "object": {"type": "object"},
    "recursive": {"anyOf": [{"type": ["number", "string", "null"]}, {"items": {"$ref": "#"}, "uniqueItems": True}]},
    "pattern": {"type": "string", "pattern": r"^(\w+\s?)*$"},
}


def scored(name: str, **options: object) -> Callable[[str], object]:
    def score(text: str) -> object:
        own = {
            "solution": ["B" if name == "multiple_choice" else "72"],
            "prompts": ["What is 8 times 9?"],
            "completion_ids": [[7]],
        }
        asked = inspect.signature(rewards[name]).parameters
        columns = {column: values for column, values in own.items() if column in asked}
        return rewards[name](completions=[[{"role": "assistant", "content": text}]], **columns, **options)

    return score


def refused(read: Callable[..., object], *given: object) -> None:
    with suppress(ValueError):
        read(*given)


def asked(dialect: Any, text: str) -> None:
    said = [{"role": "user", "content": text}]
    refused(dialect.parse, json.dumps({"messages": said, "input": said, "model": "m", "max_tokens": 1}).encode())


# name -> (what reads a text, the modules whose literals are its fragments)
READERS: dict[str, tuple[Callable[[str], object], tuple]] = {
    **{
        f"format {style}": (scored("format", style=style), (texts, functions.matches_format))
        for style in functions.FORMAT_STYLES
    },
    **{name: (scored(name), (functions,)) for name in ("code_format", "reasoning_steps", "repetition")},
    **{f"tags {n}": (scored("tags", newlines=n), (texts,)) for n in (False, True)},
    "multiple_choice": (scored("multiple_choice"), (choices, math_marks)),
    "last_number": (scored("last_number"), (baselines,)),
    "exact_match": (scored("exact_match", ignore_case=True, ignore_punctuation=True), (answers,)),
    **{f"json_schema {s}": (scored("json_schema", default_schema=SCHEMAS[s]), (answers,)) for s in SCHEMAS},
    "language_consistency": (scored("language_consistency"), (lengths,)),
    **{n: (scored(n, scorer=lambda chats: [1.0] * len(chats)), (minimind,)) for n in ("minimind", "minimind_current")},
    "minimind strict": (scored("minimind", strict=True), (minimind,)),
    "accuracy": (
        scored("accuracy"),
        (math_copies, math_marks, math_notation, math_units, math_values),
    ),
    "think_format_reward": (scored("think_format_reward"), (texts,)),
    "accuracy_reward": (scored("accuracy_reward"), (math_marks,)),
    "reasoning_accuracy_reward": (scored("reasoning_accuracy_reward"), (math_marks,)),
    "code": (code.extract_code, (code,)),
    "remote": (JUDGE, (remote,)),
    "answer_block": (texts.answer_block, (texts,)),
    "boxes": (texts.boxes, (texts,)),
    "final_answer": (answers.final_answer, (texts, answers)),
    "json": (lambda text: refused(safe_reading.parse_json, text), (safe_reading,)),
    "json in json": (lambda text: refused(requests.call_of, "a", text), (safe_reading, requests)),
    "rows": (lambda text: json_rows._of_line(text.encode()), (json_rows, safe_reading)),
    "chat": (lambda text: refused(chat.parse, text.encode()), (safe_reading, chat)),
    **{
        f"request of {dialect.__name__.rpartition('.')[2]}": (partial(asked, dialect), (dialect, requests))
        for dialect in (chat, messages, responses)
    },
    "message": (errors.redacted_text, (errors,)),
    "path": (lambda text: paths.expand("output_dir", text), (paths,)),
    "url": (lambda text: errors.redacted_text(f"https://a{text}"), (errors,)),
    "secrets": (errors.without_secrets, (errors,)),
    "terminal": (lambda text: terminal.SafeStream(io.StringIO()).write(text), (terminal,)),
    "output": (lambda text: command._CODES.sub(" ", text), (command,)),
    "filled": (lambda text: command.filled(text, {"prompt": "a"}), (command,)),
    "guess": (lambda text: guess.Guess().step({"role": "assistant", "content": text}), (guess,)),
}
COUNT_TOKENS = {"soft_overlong", "length_penalty", "get_soft_overlong_punishment"}
READ_ELSEWHERE = {
    "reasoning_gym": "by answer_block and the task's verifier",
    "reward_model": "by a model",
    "random": "by a hash",
    "cosine_length": "by accuracy",
}


def fragments(source: object) -> list[str]:
    """Return runs of successive literals in the patterns and strings of each statement of a source."""
    found: dict[str, None] = {}
    for statement in ast.parse(inspect.getsource(source)).body:
        docstrings = [ast.get_docstring(n, clean=False) for n in ast.walk(statement) if isinstance(n, ast.FunctionDef)]
        constants = [node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)]
        strings = [c for c in constants if isinstance(c, str) and c not in docstrings]
        found |= dict.fromkeys(runs([piece for string in strings for piece in pieces_of(string)]))
    return list(found)


def runs(parts: list[str]) -> Iterator[str]:
    """Yield up to four successive parts, joined."""
    for size in (1, 2, 3, 4):
        for start in range(len(parts) - size + 1):
            if 0 < len(joined := "".join(parts[start : start + size])) <= LONGEST:
                yield joined


def pieces_of(string: str) -> list[str]:
    try:
        return list(pieces(re._parser.parse(string)))
    except re.error:
        return [string]


def pieces(parsed: object) -> Iterator[str]:
    """Yield the runs of literal characters of a parsed pattern, and an instance of each class of characters."""
    run = ""
    for operator, argument in parsed:
        if str(operator) == "LITERAL":
            run += chr(argument)
            continue
        if run:
            yield run
            run = ""
        for part in inner(argument):
            yield from pieces(part)
    if run:
        yield run


def inner(argument: object) -> Iterator[object]:
    """Yield the parsed patterns inside the argument of an operator."""
    if isinstance(argument, re._parser.SubPattern):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from inner(part)


def seconds(read: Callable[[str], object], text: str) -> float:
    """Return the processor's time that a text takes; beyond the limit it is given up."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{text[:80]!r}, repeated")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    started = time.process_time()
    try:
        read(text)
        return time.process_time() - started
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def hostile(read: Callable[[str], object], sources: tuple, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple, str]]:
    """Return frames and what is repeated in them: what is common, literals of the reader's patterns, pairs."""
    compiled: list[str] = []
    with monkeypatch.context() as patch:  # patterns that are made while it reads
        patch.setattr(
            re, "compile", lambda pattern, flags=0, real=re.compile: compiled.append(pattern) or real(pattern, flags)
        )
        read("<think>\n\n</think>\n<answer>\n72\n</answer>")
    literals = list(dict.fromkeys(fragment for source in sources for fragment in fragments(source)))
    own = list(product(FRAMES, (run for pattern in compiled for run in runs(pieces_of(pattern)))))
    draw = random.Random(0)
    single, found = list(product(FRAMES, literals)), COMMON + literals
    common = [(frame, piece) for piece in COMMON for frame in (BEFORE_X, draw.choice(FRAMES))]
    pairs = [(draw.choice(FRAMES), draw.choice(found) + draw.choice(found)) for _ in range(MOST)]
    return [text for kind in (own, single) for text in draw.sample(kind, min(MOST, len(kind)))] + common + pairs


def repeated(frame: tuple[str, str], piece: str, length: int) -> str:
    before, after = frame
    return before + piece * ((length - len(before + after)) // len(piece)) + after


def test_every_reward_that_reads_a_text_is_under_the_law():
    assert {name.partition(" ")[0] for name in READERS} >= set(rewards) - COUNT_TOKENS - set(READ_ELSEWHERE)


@pytest.mark.cases(14)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", READERS)
def test_no_reader_is_worse_than_linear_in_the_length_of_a_text(name, monkeypatch):
    read, sources = READERS[name]
    read("72")  # what is imported on first use
    times = {}
    for frame, piece in hostile(read, sources, monkeypatch):
        times[frame, piece] = seconds(read, repeated(frame, piece, LENGTH // SHORTER))
    for frame, piece in sorted(times, key=times.__getitem__)[-3:]:
        half, whole = (min(seconds(read, repeated(frame, piece, n)) for _ in range(3)) for n in (LENGTH // 2, LENGTH))
        print(f"{name}: {half:.4f} s for 50 kB, {whole:.4f} s for 100 kB of {piece!r} in {frame!r}")
        assert whole < max(NOTICEABLE, RATIO * half), (frame, piece)


def test_many_messages_are_rendered_in_linear_time():
    said = [{"role": "user", "content": f"{i}"} for i in range(20_000)]
    renderer = rendering.Renderer(tiny.tokenizer(), {})
    half, whole = (seconds(lambda n: renderer.opening(said[:n], None), n) for n in (10_000, 20_000))
    assert whole < max(SECONDS, RATIO * half)
