"""`chat_template` of a recipe: checked before anything is loaded, set on the tokenizer, saved with the model."""

import json

import pytest
import yaml
from transformers import AutoTokenizer

from grpo_ext.data.chat_template import template_problems, template_text
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.train import train
from support import tiny

PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
LOST_SYSTEM = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "system_prompt", "expected"),
    [
        (PLAIN, "Answer.", None),
        (NO_SYSTEM, None, None),
        ("{% for m in messages %}", None, "fails on a prompt of user messages (Unexpected end of template"),
        ("{{ messages[7]['content'] + 1 }}", None, "fails on a prompt of user messages (list object has no element 7"),
        ("{{ bos_token }}hello", None, "leaves out the user's text 'What is 2 + 3?'"),
        (NO_SYSTEM, "Answer.", "fails on a prompt of system and user messages (no system)"),
        (LOST_SYSTEM, "Answer.", "leaves out the system's text 'Answer.'"),
        (PARTS, None, None),
        ("chatml", None, "chat_template='chatml...': not Jinja"),
        ("no/such.jinja", None, "chat_template='no/such.jinja': no such file"),
    ],
)
def test_a_template_is_rendered_before_data_are_downloaded(tmp_path, template, system_prompt, expected):
    recipe = tiny.TRAINING | {
        "model_name_or_path": tiny.save(tmp_path / "model"),
        "dataset_name": "someone/something",
        "reward_funcs": ["accuracy"],
        "chat_template": template,
        "system_prompt": system_prompt,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    if expected is None:
        load_recipe(["--config", str(tmp_path / "recipe.yaml")], Preflight())
        return
    with pytest.raises(ConfigError) as refused:
        load_recipe(["--config", str(tmp_path / "recipe.yaml")], Preflight())
    (problem,) = refused.value.problems
    assert str(problem).startswith("chat_template")
    assert expected in str(problem)


def test_a_template_may_be_a_file(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(PLAIN)
    assert template_text(str(path)) == template_text(PLAIN) == PLAIN
    assert not list(template_problems(str(path)))


def test_a_recipes_template_makes_the_prompts_and_is_saved_with_the_model(tmp_path):
    """Prompts of 12 letters: the tokenizer's own template makes 13 tokens of one, the recipe's 14."""
    rows = [
        {"prompt": [{"role": "user", "content": "abcdefghijk" + "lmnop"[i % 5]}], "solution": "1"} for i in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    template = "{% for m in messages %}{{ m['content'] }}?={% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    recipe = tiny.TRAINING | {
        "model_name_or_path": tiny.save(tmp_path / "model"),
        "dataset_name": str(tmp_path / "train.jsonl"),
        "reward_funcs": [{"name": "spread", "func": "support.tiny:spread"}],
        "reward_workers": 0,
        "max_steps": 1,
        "max_prompt_length": 14,
        "chat_template": str(tmp_path / "t.jinja"),
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    argv = ["--config", str(tmp_path / "recipe.yaml")]
    trainer = train(load_recipe(argv))
    tokens = {entry["num_tokens"] - 8 * entry["completions/mean_length"] for entry in trainer.state.log_history[:1]}
    assert tokens == {8 * 14}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == template

    with pytest.raises(ConfigError, match="chat_template='chatml"):
        load_recipe([*argv, "--chat_template", "chatml"])
    with pytest.raises(ValueError, match="max_prompt_length=13: drops all 8 rows"):
        train(load_recipe([*argv, "--max_prompt_length", "13", "--output_dir", str(tmp_path / "other")]))
