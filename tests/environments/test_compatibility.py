"""Environments are checked against data, settings and chat templates before anything is trained."""

import pytest
from datasets import Dataset
from trl.chat_template_utils import qwen3_chat_template

from grpo_ext.environments import compatibility
from grpo_ext.environments.composition import parse_environments
from support import tiny

ASKED = [{"role": "user", "content": "go"}]
IMAGE = [{"role": "user", "content": [{"type": "image", "image": "f.png"}, {"type": "text", "text": "What is it?"}]}]
URL = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]}]
COUNTER, SOLVED = "support.worlds:Counter", "support.worlds:Solved"


def specs(*entries):
    found, problems = parse_environments(list(entries))
    assert not problems
    return found


def data(prompt=ASKED, **columns):
    return Dataset.from_dict({"prompt": [prompt] * 2, **columns})


@pytest.mark.parametrize(
    ("entries", "rows", "message"),
    [
        ([SOLVED], data(solutions=["1", "2"]), "environment 'Solved': it needs 'solution'"),
        (["support.worlds:Strict"], data(solution=["1", "2"]), "its reset does not take prompt, solution"),
        (["guess", COUNTER], data(), "column 'environment': missing"),
        (
            ["guess", COUNTER],
            data(environment=["guess", "Conter"]),
            "='Conter': not an entry of environments.",
        ),
        (["guess"], data(trajectory=[1, 2]), "Rename the column"),
        (["guess"], data(IMAGE), None),
        (["guess"], data(URL), "content of type 'image_url', and environments carry text and images"),
        (["guess"], data("go"), "prompt='go': the prompts are text"),
        (["guess"], data(solution=["1", "2"]), None),
        ([COUNTER], data(solution=["1", "2"]), None),
        ([SOLVED], data(solution=["1", "2"]), None),
        ([{"tools": ["support.worlds:add"]}], data(solution=["1", "2"]), None),
        ([{"tools": ("support.worlds:add",)}], data(solution=["1", "2"]), None),
    ],
)
def test_data_that_do_not_fit_are_refused(entries, rows, message):
    problems = [str(problem) for problem in compatibility.dataset_problems(specs(*entries), rows)]
    assert len(problems) == (message is not None)
    assert all(message in problem for problem in problems)


ONE_QUESTION = "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("entry", "template", "message"),
    [
        (COUNTER, None, "does not render calls of tools"),
        (COUNTER, qwen3_chat_template + "{# of mine #}", "response_template"),
        (COUNTER, qwen3_chat_template, None),
        ("guess", ONE_QUESTION, "does not take user, assistant, user (one)"),
    ],
)
def test_chat_templates_that_do_not_fit_are_refused(entry, template, message):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    problems = [str(problem) for problem in compatibility.policy_problems(specs(entry), tokenizer, {})]
    assert len(problems) == (message is not None)
    assert all(message in problem for problem in problems)
