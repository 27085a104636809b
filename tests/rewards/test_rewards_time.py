"""No text takes a reward time beyond proportion to its length, no formula time beyond its limit, in any thread."""

import _thread
import math
import re
import threading
import time
from functools import partial

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.code.reward import extract_code
from grpo_ext.rewards.library import math_time
from grpo_ext.rewards.library.functions import FORMAT_STYLES
from grpo_ext.rewards.models.remote import JUDGE_PATTERN
from support.processes import PATIENCE

LENGTH = 40_000
SECONDS = 0.5  # of the processor, so that a busy machine fails nothing; all take less than a fifth of it

PIECES = [
    "\n", " ", "\t \n", "<think>", "</think>", "<answer>", "</answer>", "<answer>\n", "`", "```", "```a\n",
    "```json\n", "#", "####", "#### 1 ", "{", "}", "{}", "^{", "\\", "\\boxed{", "\\text{}", "\\frac{1}", "\\log_2 ",
    "\\(", "\\[", "\\\\($", "\\\\[$", "\\, ", "$", "$$", "$ ", "*", "**", "* ", "_", "9", "1 ", "1,", "1.", "1/",
    "1-", "-", "-> ", "= ", "(", "1(", "<<", "<<>> ", "°", "a", "a ", "word ", "answer", "answer is ", "option ",
    "Score:", "not ", "or ", "1 or ", ",not 1", "Step 1", "!",
]  # fmt: skip
FRAMES = ["{}", "So it is 72{}", "answer{}x", "<answer>{}</answer>", "#### 1{}\nx"]
TEXT_REWARDS = {
    "accuracy": partial(rewards["accuracy"], solution=["72"]),
    "exact_match": partial(rewards["exact_match"], solution=["72"], ignore_punctuation=True),
    "multiple_choice": partial(rewards["multiple_choice"], solution=["B"]),
    "json_schema": partial(rewards["json_schema"], default_schema={"type": "object"}),
    **{f"format {style}": partial(rewards["format"], style=style) for style in FORMAT_STYLES},
    **{name: rewards[name] for name in ("tags", "reasoning_steps", "repetition", "language_consistency")},
    **{
        name: partial(rewards[name], ["q"], scorer=lambda chats: [1.0] * len(chats))
        for name in ("minimind", "minimind_current")
    },
    "code": lambda completions: extract_code(*completions),
    "remote": lambda completions: re.findall(JUDGE_PATTERN, *completions),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TEXT_REWARDS)
def test_repetitive_texts_are_scored_quickly(name):
    if name == "json_schema":
        pytest.importorskip("jsonschema")
    TEXT_REWARDS[name](["72"])  # what is imported on first use
    for frame in FRAMES:
        for piece in PIECES:
            text = frame.format(piece * (LENGTH // len(piece)))
            started = time.process_time()
            TEXT_REWARDS[name]([text])
            assert time.process_time() - started < SECONDS, (frame, piece)


def in_a_thread(function, *arguments) -> list:
    """What a function returns in another thread than the main one; [] if it is not over in time."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)), daemon=True)
    thread.start()
    thread.join(60)
    return found


@pytest.mark.parametrize("formula", [r"\int_0^1 x^{x^{x^x}} dx", r"\binom{10^9}{5\cdot 10^8}"])
def test_a_formula_that_takes_forever_is_given_up_in_every_thread(formula, monkeypatch):
    monkeypatch.setattr(math_time, "SECONDS", 1)
    completions, solution = [rf"\boxed{{{formula}}}", r"\boxed{72}"], ["72", "72"]
    rewards["accuracy"](completions[1:], solution[1:])  # what is imported on first use
    assert rewards["accuracy"](completions, solution) == [0.0, 1.0]
    assert in_a_thread(rewards["accuracy"], completions, solution) == [[0.0, 1.0]]


class Over(BaseException):
    """As math-verify's."""


def swallow() -> None:
    """Ends at the second exception only."""
    for _ in range(2):
        try:
            while True:
                time.sleep(0.001)
        except Over:
            continue
    raise Over


def sleep_until(end: float) -> None:
    while time.monotonic() < end:
        time.sleep(1e-5)


def cut_off() -> list[int]:
    """Which of 100 blocks were cut off; every fourth has no end, the others end about when their time is up."""
    cut = []
    for turn in range(100):
        end = time.monotonic() + (0.008 + turn % 10 * 4e-4 if turn % 4 else math.inf)
        try:
            math_time.raising(Over, 0.01, partial(sleep_until, end))
        except Over:
            cut.append(turn)
        sum(range(1000))  # where a late one would be raised
    return cut


def test_what_a_limit_raises_stays_inside_it():
    threads = _thread._count()
    [cut] = in_a_thread(cut_off)
    assert set(cut) >= set(range(0, 100, 4))
    with pytest.raises(Over):
        math_time.raising(Over, 0.01, swallow)
    deadline = time.monotonic() + PATIENCE
    while _thread._count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)
