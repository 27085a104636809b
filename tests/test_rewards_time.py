"""No text takes a reward more than time in proportion to its length, whatever a model repeats."""

import inspect
import re
import time

import pytest

from grpo_ext.rewards import rewards
from grpo_ext.rewards.code import extract_code
from grpo_ext.rewards.remote import JUDGE_PATTERN

LENGTH, SECONDS = 20_000, 2  # of the processor, so that a busy machine fails nothing; what was wrong took minutes

# Each is repeated, and stands between an opening that a pattern may wait to see closed and an end that it does not want.
PIECES = [
    "\n", " ", "\t \n", "<think>", "</think>", "<answer>", "</answer>", "<answer>\n", "```", "```a\n", "```json\n", "`",
    "#", "####", "#### 1 ", "{", "}", "{}", "\\boxed{", "\\text{}", "\\frac{1}", "\\log_2 ", "\\(", "\\[", "\\, ", "\\",
    "$", "$$", "$ ", "**", "* ", "_", "9", "1 ", "1,", "1.", "1/", "1-", "-", "-> ", "= ", "(", "1(", "<<", "<<>> ", "°",
    "a", "a ", "word ", "answer is ", "answer", "option ", "Score:", "not ", "or ", "1 or ", "Step 1", "?", "!", "\"",
    "\u2009", "\u4e2d", "^{",
]  # fmt: skip
FRAMES = ["{}", "So it is 72{}", "answer{}x", "{}\n72", "<answer>{}</answer>", "\\boxed{{{}}}", "1{}2", "#### 1{}\nx"]
TEXTS = {
    **{name: rewards[name] for name in ("accuracy", "multiple_choice", "exact_match", "json_schema", "format", "tags")},
    **{name: rewards[name] for name in ("reasoning_steps", "repetition", "language_consistency", "minimind")},
    "minimind_current": rewards["minimind_current"],
}
