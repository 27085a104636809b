"""How `accuracy` and TRL's `accuracy_reward` judge Math-Verify's own test cases.

`make bench` writes results/answers.json. The cases are tests/rewards/math_verify_cases.jsonl; the differences to
`accuracy` are explained in math_verify_disagreements.yaml beside it. TRL reads LaTeX only in a box or after "final
answer is".
"""

import json
import logging
from collections import Counter
from pathlib import Path

import yaml
from trl.rewards import accuracy_reward

from grpo_ext.rewards.catalogue import rewards

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "rewards" / "math_verify_cases.jsonl"
DISAGREEMENTS = CASES.with_name("math_verify_disagreements.yaml")
RESULT = Path(__file__).parent / "results" / "answers.json"


def main() -> None:
    logging.disable(logging.WARNING)  # of LaTeX that cannot be parsed
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()[1:]]
    columns = {name: [case[name] for case in cases] for name in ("solution", "completion", "expected")}
    ours = rewards["accuracy"](columns["completion"], columns["solution"])
    chats = [[{"role": "assistant", "content": text}] for text in columns["completion"]]
    trl = accuracy_reward(chats, columns["solution"])
    wrong = Counter(entry["wrong"] for entry in yaml.safe_load(DISAGREEMENTS.read_text(encoding="utf-8")))
    found = {
        "cases": len(cases),
        "accuracy": {
            "agrees": sum(map(float.__eq__, map(_number, ours), columns["expected"])),
            "paid_wrongly": sum(o == 1 and e == 0 for o, e in zip(ours, columns["expected"], strict=True)),
            "disagrees_and_is_wrong": wrong["ours"],
            "disagrees_and_is_right": wrong["theirs"],
        },
        "trl_accuracy_reward": {
            "agrees": sum(map(float.__eq__, map(_number, trl), columns["expected"])),
            "paid_wrongly": sum(o == 1 and e == 0 for o, e in zip(trl, columns["expected"], strict=True)),
        },
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _number(value: float | None) -> float:
    return -1.0 if value is None else value


if __name__ == "__main__":
    main()
