"""How `accuracy`, math-verify by itself and TRL's `accuracy_reward` judge labelled answers and Math-Verify's cases.

`make bench` writes results/answers.json. The labelled answers are answer_forms.txt beside this file, which no reader
was written for. TRL reads LaTeX only in a box or after "final answer is"; it and math-verify get a reference without a
mark as `$...$`. GSM8K (`--data FOLDER` with train.jsonl and test.jsonl) is read by `accuracy` only, in twelve forms,
each with the right answer and with a changed one; without the folder its figures stay.
"""

import argparse
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import yaml
from math_verify import parse, verify
from trl.rewards import accuracy_reward

from grpo_ext.rewards.catalogue import rewards

ROOT = Path(__file__).parent.parent
FORMS = Path(__file__).with_name("answer_forms.txt")
CASES = ROOT / "tests" / "rewards" / "math_verify_cases.jsonl"
DISAGREEMENTS = CASES.with_name("math_verify_disagreements.yaml")
RESULT = Path(__file__).parent / "results" / "answers.json"
GSM8K_FORMS = {
    "hash": "{body}\n#### {answer}",
    "hash, then text": "{body}\n#### {answer}\n\nLeila buys 3 cucumbers.",
    "answer tag": "<think>\n{body}\n</think>\n<answer>\n{answer}\n</answer>",
    "other tag": "{body}\n<final>{answer}</final>",
    "box": "{body}\nThe total is $\\boxed{{{answer}}}$.",
    "box with unit": "{body}\n\\[\\boxed{{{answer} \\text{{ dollars}}}}\\]",
    "answer is": "{body}\nThe answer is {answer}.",
    "bold": "{body}\n\n**Answer:** ${answer}$",
    "json": '{body}\n{{"answer": "{answer}"}}',
    "after thinking": "<think>{body}</think>\n\n{answer}",
    "plain sentence": "{body}\nSo the total is {answer}.",
    "Spanish": "{body}\nLa respuesta es {answer}.",
}
Row = tuple[str, dict[str, str], str, str, str, str, bool]
"""Reward, options, kind, reference, question, text, and whether a teacher pays."""


def labelled(path: Path) -> Iterator[Row]:
    """Yield the answers of a file that are right or wrong."""
    reward, options, kind, solution, question = "accuracy", {}, "", "", ""
    for line in path.read_text(encoding="utf-8").splitlines():
        sign, _, text = line.replace("⏎", "\n").partition(" ")
        if sign == "@":
            reward, _, style = text.partition(" ")
            options = {"style": style} if style else {}
        elif sign == "#":
            kind = text
        elif sign == "=":
            solution, question = text, ""
        elif sign == "?":
            question = text
        elif sign and sign in "+-":
            yield reward, options, kind, solution, question, text, sign == "+"


def ours(row: Row) -> float | None:
    reward, options, _, solution, question, text, _ = row
    columns = {} if reward == "format" else {"solution": [solution], "prompts": [question]}
    return rewards[reward](completions=[text], **columns, **options)[0]


def math_verify(row: Row) -> float:
    return float(verify(parse(_latex(row[3])), parse(row[5])))


def trl(row: Row) -> float | None:
    return accuracy_reward([[{"content": row[5]}]], [_latex(row[3])])[0]


def _latex(solution: str) -> str:
    return solution if "$" in solution or r"\boxed" in solution else f"${solution}$"


JUDGES: dict[str, Callable[[Row], float | None]] = {"accuracy": ours, "math_verify": math_verify, "trl": trl}


def side_by_side(rows: list[Row], seconds: dict[str, list[float]]) -> dict[str, dict[str, dict[str, int]]]:
    """Return for each judge, and for ours each kind, how many right and wrong answers it pays and does not pay."""
    found: dict[str, dict[str, Counter]] = {}
    for name, judge in JUDGES.items():
        kinds: dict[str, Counter] = defaultdict(Counter)
        for row in rows:
            if row[0] not in ("accuracy", *{"accuracy": ("format", "multiple_choice")}.get(name, ())):
                continue  # the others have no such reward
            started = time.perf_counter()
            paid = judge(row) == 1
            if row[0] == "accuracy":
                seconds[name].append(time.perf_counter() - started)
            verdict = ("right_paid" if paid else "right_lost") if row[6] else "wrong_paid" if paid else "wrong_unpaid"
            for kind in (row[0], f"{row[0]}: {row[2]}") if name == "accuracy" else (row[0],):
                kinds[kind][verdict] += 1
        found[name] = {kind: dict(sorted(counts.items())) for kind, counts in kinds.items()}
    return found


def gsm8k(folder: Path, seconds: list[float]) -> dict[str, dict[str, int]]:
    """Return for each form how many of the right answers and of the changed ones are paid."""
    lines = [line for name in ("train", "test") for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]
    rows = [json.loads(line) for line in lines]
    found: dict[str, dict[str, int]] = {}
    for form, text in GSM8K_FORMS.items():
        counts: Counter = Counter()
        for i, row in enumerate(rows):
            body, _, answer = row["answer"].rpartition("\n#### ")
            number = int(answer.replace(",", ""))
            changed = str((number + 1, number * 10 or 10, number - 1, -number or 3)[i % 4])
            for name, given in (("right_paid", answer), ("changed_paid", changed)):
                started = time.perf_counter()
                completion = text.format(body=body, answer=given)
                counts[name] += rewards["accuracy"]([completion], [answer], prompts=[row["question"]])[0] == 1
                seconds.append(time.perf_counter() - started)
        found[form] = {"rows": len(rows), **counts}
    return found


def math_verify_cases() -> dict[str, object]:
    """Return how Math-Verify's own test cases are judged; the differences are explained beside them."""
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()[1:]]
    columns = {name: [case[name] for case in cases] for name in ("solution", "completion", "expected")}
    chats = [[{"role": "assistant", "content": text}] for text in columns["completion"]]
    wrong = Counter(entry["wrong"] for entry in yaml.safe_load(DISAGREEMENTS.read_text(encoding="utf-8")))
    found = {"cases": len(cases)}
    for name, scores in (
        ("accuracy", rewards["accuracy"](columns["completion"], columns["solution"])),
        ("trl_accuracy_reward", accuracy_reward(chats, columns["solution"])),
    ):
        pairs = [(-1.0 if score is None else score, e) for score, e in zip(scores, columns["expected"], strict=True)]
        found[name] = {
            "agrees": sum(s == e for s, e in pairs),
            "paid_wrongly": sum(s == 1 and e == 0 for s, e in pairs),
        }
    found["accuracy"] |= {"disagrees_and_is_wrong": wrong["ours"], "disagrees_and_is_right": wrong["theirs"]}
    return found


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * second for second in seconds)
    p99 = ordered[int(0.99 * len(ordered))]
    return {
        "verdicts": len(ordered),
        "median": round(median(ordered), 3),
        "p99": round(p99, 2),
        "max": round(ordered[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    data = parser.parse_args().data
    logging.disable(logging.ERROR)  # of LaTeX that cannot be parsed
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    seconds: dict[str, list[float]] = defaultdict(list)
    found = {
        **math_verify_cases(),
        "forms": side_by_side(list(labelled(FORMS)), seconds),
        "gsm8k": gsm8k(data, seconds["accuracy_gsm8k"]) if data else before.get("gsm8k"),
    }
    found["milliseconds"] = {name: milliseconds(times) for name, times in seconds.items()}
    if not data and "milliseconds" in before:
        found["milliseconds"] = before["milliseconds"] | found["milliseconds"]
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
