"""No text takes a reward time beyond proportion to its length, no formula time beyond its limit."""

import re
import time
from functools import partial

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.code.reward import extract_code
from grpo_ext.rewards.library import math_equality
from grpo_ext.rewards.library.functions import FORMAT_STYLES
from grpo_ext.rewards.models.remote import JUDGE_PATTERN

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


@pytest.mark.parametrize("formula", [r"\int_0^1 x^{x^{x^x}} dx", r"\binom{10^9}{5\cdot 10^8}"])
def test_a_formula_that_takes_forever_is_given_up(formula, monkeypatch):
    monkeypatch.setattr(math_equality, "TIME_LIMIT", 1)
    logged, counted = {}, {}
    logs = {"log_extra": logged.__setitem__, "log_metric": counted.__setitem__}
    assert rewards["accuracy"]([rf"\boxed{{{formula}}}", r"\boxed{72}"], ["72", "72"], **logs) == [0.0, 1.0]
    assert logged["answer_parsed"] == ["[time limit]", "72"]
    assert counted == {"accuracy/out_of_time": 1}
