"""Options out of range are refused before anything is scored, with the option and its value."""

import asyncio
import inspect
import math
import re

import pytest

from grpo_ext.rewards.catalogue import rewards

URL = "http://127.0.0.1:9/score"


def remote(**options):
    return "remote", {"url": URL, "protocol": "score"} | options


def judge(**options):
    return remote(protocol="openai_judge", **options)


def model(**options):
    return "reward_model", {"model": "nowhere"} | options


REFUSED = [
    ("format", {"style": "think_answers"}, "style='think_answers': not a format. Did you mean 'think_answer'"),
    ("accuracy", {"read": "box"}, "read='box': not a place of an answer. Did you mean 'boxed'?"),
    ("accuracy", {"max_length": 0}, "max_length=0"),
    *(("soft_overlong", {"max_length": 100, "buffer": n}, f"buffer={n}: ") for n in (0, -1, 101)),
    ("repetition", {"n": 0}, "n=0"),
    ("repetition", {"max_penalty": 0.1}, "max_penalty=0.1"),
    ("reasoning_gym", {"extract": "lastline"}, "extract='lastline': unknown. Did you mean 'last_line'"),
    ("cosine_length", {"max_length": 0}, "max_length=0"),
    ("cosine_length", {"max_length": 9, "min_value_correct": 2.0}, "min_value_correct=2.0 with max_value_correct=1.0"),
    ("cosine_length", {"max_length": 9, "max_value_wrong": -2.0}, "min_value_wrong=-1.0 with max_value_wrong=-2.0"),
    ("length_penalty", {"target": -1}, "target=-1"),
    ("length_penalty", {"target": 9, "per_token": -1.0}, "per_token=-1.0"),
    ("length_penalty", {"target": 9, "max_penalty": 1.0}, "max_penalty=1.0"),
    ("language_consistency", {"language": "english"}, "language='english': its script is unknown. Known: ar, "),
    ("language_consistency", {"scripts": []}, "scripts=[]"),
    ("multiple_choice", {"choices": "AAB"}, "choices='AAB'"),
    ("multiple_choice", {"choices": "A1"}, "choices='A1'"),
    ("json_schema", {"valid_json": 1.5}, "valid_json=1.5"),
    ("code", {"workers": 0}, "workers=0"),
    ("code", {"timeout": 0.0}, "timeout=0.0"),
    ("code", {"memory_mb": 1}, "memory_mb=1"),
    ("code", {"min_protection": "none"}, "min_protection='none'"),
    ("minimind", {"score_clip": 0.0}, "score_clip=0.0"),
    ("minimind", {"answer_weight": 1.5}, "answer_weight=1.5"),
    ("minimind", {"strict": True, "reasoning": False}, "strict=True with reasoning=False"),
    ("minimind_current", {"score_clip": math.nan}, "score_clip=nan"),
    ("minimind_current", {"n": 0}, "n=0"),
    ("minimind_current", {"repetition_cap": -0.5}, "repetition_cap=-0.5"),
    (*model(kind="classification"), "kind='classification': unknown. Did you mean 'sequence_classification'"),
    (*model(dtype="bf16"), "dtype='bf16'"),
    (*model(micro_batch_size=0), "micro_batch_size=0"),
    (*model(max_length=0), "max_length=0"),
    (*model(score_clip=0.0), "score_clip=0.0"),
    (*model(score_clip=math.nan), "score_clip=nan"),
    (*model(answer_weight=1.1), "answer_weight=1.1"),
    (*remote(protocol="scores"), "protocol='scores': no such protocol. Did you mean 'score'"),
    (*remote(url="localhost:8000/score"), "url='localhost:8000/score'"),
    (*remote(url="file:///etc/passwd"), "is not an address"),
    (*remote(batch_size=0), "batch_size=0"),
    (*remote(protocol="classify", batch_size=4), "one chat per request. Remove it, or set a template"),
    (*judge(batch_size=4), "one chat per request. Remove it."),
    (*remote(max_concurrency=0), "max_concurrency=0"),
    (*remote(retries=-1), "retries=-1"),
    (*remote(backoff=-0.1), "backoff=-0.1"),
    (*remote(timeout=0), "timeout=0"),
    (*remote(scale=0.0), "scale=0.0"),
    (*remote(template="{prompt}"), "template='{prompt}': protocol 'score' does not use"),
    (*remote(pattern="(x)"), "pattern='(x)': protocol 'score' does not use"),
    (*remote(class_index=0), "class_index=0: protocol 'score' does not use"),
    (*judge(pattern="x"), "0 groups"),
    (*judge(pattern="("), "not a regular expression"),
    (*judge(template="{"), "Write {{ and }} for braces"),
    (*judge(template="{solution}", solutions=[]), "Did you mean 'solutions'"),
    (*judge(template="{}"), "template names {}"),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSED)
def test_an_option_out_of_range_is_refused_before_anything_is_scored(name, options, words):
    function = rewards[name]
    columns = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    async def score() -> None:
        values = function(**{column: [] for column in columns if column != "log_extra"}, **options)
        await values if inspect.iscoroutine(values) else None

    with pytest.raises(ValueError, match=re.escape(words)):
        asyncio.run(score())
