"""Math-Verify's own test cases: `accuracy` judges them alike, or it is written down who is right."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from grpo_ext.rewards.catalogue import rewards

CASES = Path(__file__).parent / "math_verify_cases.jsonl"
DISAGREEMENTS = CASES.with_name("math_verify_disagreements.yaml")
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "answers.json"


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_every_disagreement_is_listed_and_few_are_ours(share):
    """Of every fifth comparison, of which the parser takes 2 seconds, and of all."""
    source, *cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    assert source["licence"].startswith("Apache-2.0")
    assert len(cases) == 269
    judged = range(0, len(cases), share)
    columns = {name: [cases[i][name] for i in judged] for name in ("completion", "solution", "expected")}
    with ThreadPoolExecutor(1) as thread:  # where no alarm is set, which a busy machine would hear
        given = thread.submit(rewards["accuracy"], columns["completion"], columns["solution"]).result()
    differing = {i: g for i, g, e in zip(judged, given, columns["expected"], strict=True) if g != e}
    listed = yaml.safe_load(DISAGREEMENTS.read_text(encoding="utf-8"))
    assert differing == {entry["case"]: entry["gives"] for entry in listed if entry["case"] in judged}
    assert sum(entry["wrong"] == "ours" for entry in listed) <= 25
    figures = json.loads(RESULT.read_text())["accuracy"]
    assert figures["agrees"] == len(cases) - len(listed)
