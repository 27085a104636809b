"""The code reward: honest programs get their share, no program gets a test it does not answer."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.code import reward as module
from grpo_ext.rewards.code import sandbox
from grpo_ext.rewards.code.peers import Peer
from support.code_programs import HONEST

code = rewards["code"]
try:
    sandbox.available()
except sandbox.SandboxError as error:
    pytest.skip(f"no sandbox here: {error}", allow_module_level=True)

UNITTEST = """
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(2), {expected})
unittest.main()
"""
DOUBLE = "def f(x):\n    return 2 * x\n"


def fenced(source: str) -> str:
    return f"<think>\nplan\n</think>\nHere:\n```python\n{source}\n```\nDone."


def score(source: str, tests, **options):
    [value] = code(completions=[fenced(source)], tests=[tests], timeout=options.pop("timeout", 60.0), **options)
    return value


# which code


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```py\na\n```\n```\nb\n```\n```bash\nc\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```bash\nc\n```", ""),
        ("<think>```python\na\n```</think>\n```python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>b", "b"),
        ("<answer>\na = 1\n</answer>", "a = 1"),
        ("<answer>\n```Python3 \na\n```\n</answer>", "a\n"),
        ("a = 1", "a = 1"),
        ("", ""),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("```python\na\n```python\nb\n```\nc", "a\n```python\nb\n"),
    ],
)
def test_the_code_of_a_completion(text, expected):
    assert module.extract_code(text) == expected


# honest programs


@pytest.mark.cases(10)
@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (["assert f(2) == 4"], 1.0),
        (["assert f(2) == 4", "assert f(3) == 7"], 0.5),
        (["assert f(2) == 4", "assert f(3) == 7", "assert f(0) == 0", "assert f('a') == 'aa'"], 0.75),
        ("assert f(2) == 4\nassert f(3) == 6", 1.0),
        ("assert f(2) == 4\nassert f(3) == 7", 0.0),
        ("def check(candidate):\n    assert candidate(2) == 4\ncheck(f)", 1.0),
        (UNITTEST.format(expected=4), 1.0),
        (UNITTEST.format(expected=5), 0.0),
        (json.dumps(["assert f(2) == 4", "assert f(3) == 7"]), 0.5),
        (["def twice(x): return f(f(x))", "assert twice(1) == 4"], 1.0),
        (["assert f(2) == 4", "assert ("], None),
        ([], None),
        ("", None),
        (None, None),
        ([3], None),
        ([{"input": "1"}], None),
        (["assert f(2) == 4", {"input": "", "output": ""}], None),
        ("def test_f(): assert f(2) == 4", 1.0),
        ("def test_f(): assert f(2) == 5", 0.0),
        ("def test_f(): assert g(2) == 4", 0.0),
        ("def test_f(x): assert f(2) == 5", None),  # a parameter or a fixture: nobody calls it
        ("n = []\ndef test_f(): n.append(f(2))\ntest_f()\nassert n == [4]", 1.0),  # called once, by itself
        (UNITTEST.format(expected=4).replace("unittest.main()", ""), 1.0),
        (UNITTEST.format(expected=5).replace("unittest.main()", ""), 0.0),
        (["def near(x): assert abs(x - 4) < 1", "near(f(2))"], 1.0),
        ("def check(candidate):\n    assert candidate(2) == 5", None),  # HumanEval's, without its call
        ("f(2)", None),
        ("f(2) == 5", None),
        ("{'inputs': ['3'], 'outputs': ['6']}", None),  # as Python writes it
        ("3", None),
        ("null", None),
        (json.dumps("assert f(2) == 4"), 1.0),
    ],
)
def test_shares_by_hand(tests, expected):
    assert score(DOUBLE, tests) == expected
    if expected is not None:
        assert score(DOUBLE, tests, partial=False) == float(expected == 1)


@pytest.mark.cases(12)
@pytest.mark.parametrize(("source", "test"), HONEST)
def test_honest_programs_pass(source, test):
    assert score(source, [test]) == 1.0


PAIRS = [{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 1.0),
        ("a, b = map(int, input().split())\nprint(a + b, ' ')\nprint()", 1.0),
        ("print(3)", 0.5),
        ("print(input())", 0.0),
        ("a, b = map(int, input().split())\nprint(a + b)\n1 / 0", 0.0),
        ("a, b = map(int, input().split())\nprint(a + b)\nimport os; os._exit(0)", 0.0),  # nothing was flushed
        ("print(3)\nprint(10)", 0.0),
    ],
)
def test_programs_with_input_and_output(source, expected):
    assert score(source, PAIRS) == expected
    assert score(source, json.dumps(PAIRS), partial=False) == float(expected == 1)


APPS = {"inputs": ["1 2\n", ["5 5", ""]], "outputs": ["3\n", ["10"]]}


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (APPS, 0.5),
        ({**APPS, "fn_name": None}, 0.5),
        (PAIRS[0], 1.0),
        ({**PAIRS[0], "testtype": "stdin"}, 1.0),
        ({**APPS, "fn_name": "add"}, None),
        ({**APPS, "outputs": ["3"]}, None),
        ({**APPS, "inputs": [[1, 2], [5, 5]]}, None),
        ({"inputs": [], "outputs": []}, None),
        ({"inputs": ["1 2"]}, None),
        ({"stdin": "1 2", "stdout": "3"}, None),
        ({**PAIRS[0], "testtype": "functional"}, None),
    ],
)
def test_the_columns_of_other_datasets(tests, expected):
    assert score("print(3)", tests) == expected
    assert score("print(3)", json.dumps(tests)) == expected
    assert score("x = 1", json.dumps(tests)) == (None if expected is None else 0.0)


@pytest.mark.parametrize(
    "source",
    [
        "n = int(input()); print(2 * n); exit()",
        "n = int(input()); print(2 * n); quit(0); print(1)",
        "print(2 * int(open('/dev/stdin').read()))",
        "import sys; sys.stdin = open('/dev/stdin', 'rb'); print(2 * int(input() if 0 else sys.stdin.readline()))",
        "from pathlib import Path; print(2 * int(Path('/dev/stdin').read_text()))",
        "'A docstring.'\nfrom __future__ import annotations\nif __name__ == '__main__':\n    print(2 * int(input()))",
        "def start(): return 2 * int(input())\nclass A: pass\nimport pickle; pickle.dumps(A()); print(start())",
        "print(6 if input() and 'source' not in globals() and 'start' not in globals() else 7)",
    ],
)
def test_programs_that_expect_an_ordinary_python(source):
    assert score(source, [{"input": "3\n", "output": "6\n"}]) == 1.0


# programs that would rather not answer


@pytest.mark.parametrize("look", ["g.__globals__['WANTED']", "g.__code__.co_consts", "g.__closure__[0].cell_contents"])
def test_a_callback_can_be_called_and_not_looked_into(look):
    test = "WANTED = 4\ndef test(w):\n    assert f(lambda: w and 0) == WANTED\ntest(4)"
    assert (
        score(f"def f(g):\n    found = {look}\n    return found[0] if isinstance(found, tuple) else found", [test])
        == 0.0
    )
    assert score("def f(g): return g() + 4", [test]) == 1.0


BUILTIN = ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"]


@pytest.mark.parametrize(
    ("source", "tests", "expected"),
    [
        ("def sum(a, b): return a + b", BUILTIN, 1.0),
        ("def sum(a, b): return 25", BUILTIN, 0.5),
        ("x = 1", ["assert sum([1, 2]) == 3"], 0.0),  # Python's own is no answer
        ("sum = lambda *a: 4", ["assert sum([f(2)]) == 4"], 0.0),
        ("all = lambda *a: True", ["assert all(f(x) == y for x, y in [(2, 4)])"], 0.0),
        ("all = lambda *a: True", ["assert all(x == 4 for x in __import__('solution').f(2))"], 0.0),
        ("eval = lambda *a: True", ["assert eval('f(2) == 4')"], 0.0),
        ("abs = lambda x: 0\ndef f(x): return 5", ["from solution import *\nassert abs(f(2) - 4) < 1"], 0.0),
        (
            "class math: floor = staticmethod(lambda x: 2)",
            ["from solution import *\nassert math.floor(3.5) == 2"],
            0.0,
        ),
    ],
)
def test_a_program_takes_a_builtins_place_only_where_the_tests_ask_for_nothing_else(source, tests, expected):
    assert score(source, tests) == expected


@pytest.mark.parametrize(
    "attempt",
    [
        "peer.ask('apply', 'next', iter([1]))",
        "peer.ask('apply', 'repr', g)",
        "peer.ask('apply', 'getitem', g, 0)",
        "peer.ask('get', 0, 'gi_frame')",
    ],
)
def test_an_iterator_can_be_asked_for_its_items_and_nothing_else(attempt):
    source = (
        "import sys\ndef f(g):\n    peer = sys._getframe(1).f_locals.get('self')\n"
        f"    try: {attempt}\n    except (PermissionError, TypeError): return sum(g)"
    )
    assert score(source, ["assert f(x for x in [1, 2]) == 3"]) == ("next" not in attempt)


def test_a_test_that_kills_or_hangs_costs_only_itself():
    source = (
        "import os, time\ndef f(x):\n    if x == 1: time.sleep(1e6)\n    if x == 2: os._exit(0)\n"
        "    if x == 3: raise MemoryError\n    return x"
    )
    tests = ["import math", "def double(x): return 2 * x", *(f"assert double(f({n})) == {2 * n}" for n in range(6))]
    assert score(source, tests, timeout=1.5) == 5 / 8
    start = time.monotonic()
    assert score("while True: pass", ["assert True"] * 50, timeout=0.5) == 0.0
    assert time.monotonic() - start < 20  # once, not 50 times


def test_a_batch_keeps_its_order_and_its_nones():
    texts = [fenced("def f(x): return x"), fenced(DOUBLE), "no code here", "", fenced(DOUBLE)]
    tests = [["assert f(2) == 4", "assert f(0) == 0"]] * 4 + [None]
    for workers in (1, 4):
        assert code(completions=texts, tests=tests, workers=workers, timeout=60.0) == [0.5, 1.0, 0.0, 0.0, None]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert code(completions=chats, tests=tests, timeout=60.0, prompts=[""] * 5) == [0.5, 1.0, 0.0, 0.0, None]


def test_all_tests_of_a_program_have_a_limit_together():
    """Else a hostile program outlasts the reward's own worker and counts as not scored."""
    start = time.monotonic()
    hangs = "import time\ndef f(x):\n    if x: time.sleep(1e6)\n    return x"
    tests = ["assert f(0) == 0"] + ["assert f(1) == 1"] * 40
    assert score(hangs, tests, timeout=1.0, total_timeout=2.5) == 1 / 41
    pairs = [{"input": "", "output": "1"}] * 40
    assert score("while True: pass", pairs, timeout=1.0, total_timeout=2.5) == 0.0
    assert time.monotonic() - start < 15
    assert score(DOUBLE, ["assert f(1) == 2"], total_timeout=0.0) == 1.0  # one test has its own time


def test_memory_is_limited():
    source = "def f(n): return len(bytearray(n << 20))"
    tests = ["assert f(1) == 1 << 20", "assert f(200) == 200 << 20"]
    assert score(source, tests, memory_mb=128) == 0.5
    assert score(source, tests, memory_mb=512) == 1.0


def test_a_machine_without_a_sandbox_is_an_error_not_a_score(monkeypatch):
    monkeypatch.setattr(sandbox, "_probe", lambda: (None, ("namespaces: denied",)))
    with pytest.raises(sandbox.SandboxError, match="namespaces: denied"):
        score(DOUBLE, ["assert f(2) == 4"])


# what crosses

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
DATA = st.recursive(
    SCALARS | st.complex_numbers(allow_nan=False) | st.sets(st.integers() | st.text()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(DATA)
def test_plain_data_crosses_unchanged(value):
    peer = Peer.__new__(Peer)
    crossed = peer._decode(json.loads(json.dumps(peer._encode(value))))
    assert crossed == value
    assert repr(crossed) == repr(value) or isinstance(value, set | dict | list | tuple)
