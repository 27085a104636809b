"""Files that grow, nest or have no end are refused in seconds, by a message of a few lines."""

import os
import time
from pathlib import Path

import pytest
import yaml

from support.commands import command

SECONDS = 20.0  # each takes less than 2
SOUND = {
    "model_name_or_path": "quickstart",
    "dataset_name": "quickstart/addition",
    "reward_funcs": ["accuracy"],
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
}


def laughs(lines: int) -> str:
    """YAML in which each line has ten of the one above."""
    rows = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(lines)]
    return "\n".join(rows)


def nested(depth: int, *, inside: str = "") -> str:
    return "[" * depth + inside + "]" * depth


BOMBS = {
    "anchors": (laughs(12), "values, with those that anchors repeat"),
    "anchors in a known key": (f"{laughs(12)}\nreward_funcs: *a11", "values, with those that anchors repeat"),
    "merged anchors": ("\n".join(f"k{n}: &k{n} {{<<: [{', '.join([f'*k{n - 1}'] * 9)}]}}" if n else "k0: &k0 {x: 1}"
                                 for n in range(12)), "values, with those that anchors repeat"),
    "an anchor that holds itself": ("a: &a [*a]", "recursive"),
    "a chain of anchors": ("\n".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else ''}]" for n in range(500)), "100 deep"),
    "20,000 unknown keys": ("\n".join(f"unknown_key_{n}: {n}" for n in range(20_000)), "more than 20,000 values"),
    "9,000 unknown keys": ("\n".join(f"unknown_key_{n}: {n}" for n in range(9_000)), "a mapping of 9,006 keys"),
    "200 unknown keys": ("\n".join(f"unknown_key_{n}: {n}" for n in range(200)), "and 171 more"),
    "200 unknown options": (
        "generation_kwargs: {" + ", ".join(f"unknown_{n}: {n}" for n in range(200)) + "}", "more."
    ),
    "2,000 rewards": ("reward_funcs: [" + ", ".join(["accurracy"] * 2_000) + "]", "accurracy"),
    "2,000 data sets": ("datasets: [" + ", ".join(["{path: openai/gsm8k}"] * 2_000) + "]", "dataset"),
    "5,000 brackets": (f"beta: {nested(5_000)}", "100 deep"),
    "5,000 open brackets": (f"beta: {'[' * 5_000}", "100 deep"),
    "5,000 braces": (f"beta: {'{a: ' * 5_000}1{'}' * 5_000}", "100 deep"),
    "5,000 indents": ("\n".join(f"{' ' * n}a:" for n in range(1_400)), "100 deep"),
    "brackets in quotes": (f"beta: '{nested(5_000)}'", "beta="),
    "brackets in JSON": ("generation_kwargs: '{\"a\": " + nested(5_000) + "}'", "100 deep"),
    "brackets in JSON of ours": ("advantage_kwargs: '{\"a\": " + nested(5_000) + "}'", "100 deep"),
    "a long number": (f"seed: 0x{'f' * 5_000}", "a number of 5,002 digits"),
    "a long decimal number": (f"seed: {'9' * 5_000}", "digits"),
    "a long name": (f"? {'a' * 300_000}\n: 1", "no such key"),
    "a long value": (f"loss_type: {'a' * 300_000}", "loss_type="),
    "a long alias": (f"loss_type: *{'a' * 900_000}", "undefined alias"),
    "two megabytes": ("# " + "x" * 2**21, "more than the 1,048,576 that are read"),
    "binary": (b"\x00\xff\xfe" * 999, "not UTF-8"),
    "control characters": ("a: \x1b[2J", "not valid YAML"),
}  # fmt: skip


def refused(path: Path, capsys) -> str:
    begins = time.monotonic()
    assert command("check", "--config", path) == 2
    assert time.monotonic() - begins < SECONDS
    message = capsys.readouterr().err
    assert len(message) < 14_000
    assert message.count("\n") < 40
    return message


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_seconds(name, tmp_path, capsys):
    text, expected = BOMBS[name]
    path = tmp_path / "recipe.yaml"
    sound = yaml.safe_dump({key: value for key, value in SOUND.items() if f"\n{key}:" not in f"\n{text!s}"})
    path.write_bytes(text if isinstance(text, bytes) else f"{text}\n{sound}".encode())
    assert expected in refused(path, capsys)


def test_a_file_of_100_megabytes_is_not_read(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.touch()
    os.truncate(path, 10**8)
    assert "100,000,000 bytes" in refused(path, capsys)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_recipe_is_a_regular_file(kind, tmp_path, capsys):
    path = {"folder": tmp_path, "pipe": tmp_path / "pipe", "device": Path("/dev/zero")}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    assert str(path) in refused(path, capsys)


def test_what_a_message_leaves_out_is_kept_in_its_problems(tmp_path):
    from grpo_ext.errors import ABSENT, ConfigError, Problem

    error = ConfigError([Problem(f"key_{n}", ABSENT, "no such key", "Remove it.") for n in range(31)])
    assert str(error).endswith("and 1 more.")
    assert len(error.problems) == 31
