"""Environments against data, settings and chat templates: told before anything is trained."""

import pytest
from datasets import Dataset
from trl.chat_template_utils import qwen3_chat_template

from grpo_ext.environments import fit
from grpo_ext.environments.composition import parse
from support import tiny

ASKED = [{"role": "user", "content": "go"}]


def specs(*entries):
    found, problems = parse(list(entries))
    assert not problems
    return found


def rows(**columns):
    return Dataset.from_dict({"prompt": [ASKED] * 2, **columns})


@pytest.mark.parametrize(
    ("entries", "data", "told"),
    [
        (["support.worlds:Solved"], {"solutions": ["1", "2"]}, "its reset needs 'solution'"),
        (["support.worlds:Strict"], {"solution": ["1", "2"]}, "its reset takes no prompt, solution"),
        (["guess", "support.worlds:Counter"], {}, "no column 'environment'"),
        (["guess", "support.worlds:Counter"], {"environment": ["guess", "Conter"]}, "has 'Conter', which is no entry"),
        (["guess"], {"trajectory": [1, 2]}, "Rename the column"),
        (["guess"], {"image": [1, 2]}, "column 'image': environments carry text only"),
        (["support.worlds:Counter"], {"images": [[1], [2]]}, "column 'images': environments carry text only"),
    ],
)
def test_data_that_do_not_suit_are_told_of(entries, data, told):
    [problem] = fit.data_problems(specs(*entries), rows(**data))
    assert told in problem


@pytest.mark.parametrize(
    "entries", [["guess"], ["support.worlds:Counter"], ["support.worlds:Solved"], [{"tools": ["support.worlds:add"]}]]
)
def test_data_that_suit_are_not(entries):
    assert list(fit.data_problems(specs(*entries), rows(solution=["1", "2"]))) == []


def test_prompts_with_images_are_refused():
    content = [{"type": "image", "image": "file.png"}, {"type": "text", "text": "What is it?"}]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": content}]}])
    [problem] = fit.data_problems(specs("guess"), data)
    assert "content of type 'image', and environments carry text only" in problem


def test_prompts_of_text_are_told_of():
    [problem] = fit.data_problems(specs("guess"), Dataset.from_dict({"prompt": ["go"]}))
    assert "Set system_prompt" in problem


def test_a_template_without_tools_is_told_of():
    [problem] = fit.policy_problems(specs("support.worlds:Counter"), tiny.tokenizer(), {})
    assert "does not render calls of tools" in problem


def test_a_template_whose_calls_nobody_reads_is_told_of():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = qwen3_chat_template + "{# of mine #}"
    [problem] = fit.policy_problems(specs("support.worlds:Counter"), tokenizer, {})
    assert "response_template" in problem
    tokenizer.chat_template = qwen3_chat_template
    assert list(fit.policy_problems(specs("support.worlds:Counter"), tokenizer, {})) == []


def test_a_template_of_one_question_is_told_of():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}"
    )
    [problem] = fit.policy_problems(specs("guess"), tokenizer, {})
    assert "does not take user, assistant, user (one)" in problem
