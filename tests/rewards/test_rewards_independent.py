"""Laws of packaged rewards: the score of a completion depends on neither its batch nor earlier calls."""

import json

import pytest
from test_reward_model import save

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.composition import RewardSpec
from support.extras import need

THINKING = "<think>\na\n</think>\n<answer>\n{}\n</answer>"
TEXTS = [
    THINKING.format("72"),
    THINKING.format('```json\n{"a": 1}\n```'),
    THINKING.format("```python\ndef f(x):\n    return x + x\n```"),
    "The answer is (B).",
    "Step 1: look. Step 2: \\boxed{72} 答案",
    "<think>a</think> \\boxed{71}",
    "<think>a</think> \\boxed{72}",
    "word word word word word",
    "",
]
TEXTS += [TEXTS[0], TEXTS[-2], TEXTS[3]]  # a reward that counts equal answers in its batch is seen by these
N = len(TEXTS)
COLUMNS = {
    "prompts": ["a"] * N,
    "completions": [[{"role": "assistant", "content": text}] for text in TEXTS],
    "completion_ids": [[0] * (10 * i + 5) for i in range(N)],
    "solution": ["72"] * N,
    "tests": [["assert f(2) == 4", "assert f('a') == 'aa'", "assert f(1) == 0"]] * N,
    "schema": ['{"type": "object"}'] * N,
}
LENGTHS = {"max_completion_len": 90, "soft_punish_cache": 40}
OPTIONS = {
    "cosine_length": {"max_length": 100},
    "soft_overlong": {"max_length": 90, "buffer": 40},
    "length_penalty": {"target": 40},
    "get_soft_overlong_punishment": LENGTHS,
    "reasoning_accuracy_reward": {"reasoning_delimiters": ["</think>"]},
}
SOLUTIONS = dict.fromkeys(("accuracy_reward", "reasoning_accuracy_reward"), r"\boxed{72}") | {"multiple_choice": "B"}
INDEPENDENT = sorted(name for name in rewards if rewards.traits(name).independent)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("reward_model"))


def columns_of(name: str, model: str) -> tuple[dict, dict]:
    """Columns and options with which a reward tells these completions apart."""
    columns = COLUMNS | ({"solution": [SOLUTIONS[name]] * N} if name in SOLUTIONS else {})
    if name == "reasoning_gym":
        need("tasks")
        import reasoning_gym

        task = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=0)
        columns |= {"reasoning_gym_entry": [json.dumps({**task[0], "answer": "72"})] * N}
    if name == "code_format":
        columns |= {"language": ["python"] * N}
    if name in ("reward_model", "minimind", "minimind_current"):
        columns |= {"completions": [[{"role": "assistant", "content": "a" * (3 * i % 7)}] for i in range(N)]}
        own = {"model": model} if name == "reward_model" else {"reward_model": {"model": model}}
        return columns, own
    return columns, OPTIONS.get(name, {})


@pytest.mark.cases(7)
@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_completions_score_depends_on_that_completion_only(name, model):
    columns, options = columns_of(name, model)

    def scored(rows) -> list[float | None]:
        return list(rewards[name](**{key: [column[i] for i in rows] for key, column in columns.items()}, **options))

    batch = scored(range(N))
    assert len(set(batch)) > 1, "the law says nothing of a constant"
    singles = [scored([row])[0] for row in range(N)]
    backwards = scored(range(N - 1, -1, -1))[::-1]
    twice = scored([*range(N), *range(N)])
    for other in (singles, backwards, twice[:N], twice[N:], scored(range(N))):
        assert [value is None for value in other] == [value is None for value in batch]
        assert [value or 0.0 for value in other] == pytest.approx([value or 0.0 for value in batch], abs=1e-5)


def test_each_packaged_reward_declares_it_but_the_one_that_contains_its_own_failures():
    assert set(rewards) - set(INDEPENDENT) == {"remote"}


@pytest.mark.parametrize(
    ("function", "settings", "independent"),
    [
        ("format", {}, True),
        ("format", {"independent": False}, False),
        ("support.faulty:choke", {}, False),
        ("support.faulty:choke", {"independent": True}, True),
        ("grpo_ext.rewards.library.functions:format", {}, False),
        ("minimind", {"kwargs": {"reward_model": {"model": "m"}}}, True),
        ("minimind", {"kwargs": {"scorer": "support.faulty:novelty"}}, False),  # which may compare chats
        (len, {}, False),
        ("remote", {}, False),
    ],
)
def test_who_says_that_a_reward_is_independent(function, settings, independent):
    assert RewardSpec("x", function, **settings).is_independent is independent
