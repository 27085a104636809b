"""The reward `reasoning_gym`: the library's own scores, and nothing of an answer executed outside of the sandbox."""

import collections
import copy
import json
import math
import os
import re
import sys
import time

import pytest

from grpo_ext.environments.catalogue import environments
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.code import sandbox
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.runtime import Runtime
from support.extras import need

need("tasks")
import reasoning_gym as gym
from reasoning_gym.factory import DATASETS

try:
    METHOD = sandbox.available()
except sandbox.SandboxError as error:
    pytest.skip(f"no sandbox here: {error}", allow_module_level=True)

EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
COMPUTED = ("bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic", "rubiks_cube")
EXACT = ("coin_flip", "game_of_life", "game_of_life_halting")  # the library pays a constant for every entry
MOVED = ("rush_hour",)  # whose rows name no right answer


def entries(task, count=2, seed=7, **options):
    """Rows as their JSON is read."""
    dataset = gym.create_dataset(task, size=count, seed=seed, **options)
    found = [json.loads(json.dumps(dataset[i], default=str)) for i in range(count)]
    for entry in found:
        entry["metadata"].setdefault("source_dataset", task)
    return found


def answer_of(entry):
    metadata = entry["metadata"]
    answer = entry["answer"] or metadata.get("example_answer") or metadata.get("example_correct_answer")
    return answer or json.dumps(metadata.get("possible_answer"))


def scores(pairs):
    """Scores of (answer, entry), in one call."""
    column = [entry if isinstance(entry, str) else json.dumps(entry) for _, entry in pairs]
    texts = [answer for answer, _ in pairs]
    return rewards["reasoning_gym"](completions=texts, reasoning_gym_entry=column, extract="text")


CONSTANTS = ("0", "1", "True", "False", "A", "[]", "x", "0.0")


@pytest.mark.parametrize(
    "tasks",
    [
        (*EXACT, "puzzle24"),
        pytest.param(set(DATASETS) - {"composite", "knight_swap", "sokoban"}, marks=pytest.mark.slow),
    ],
)
def test_no_constant_is_right_for_most_entries_of_a_task(tasks):
    """Neither a constant, nor one that fits the entry's form: the first row's answer, and its zeros."""
    pairs = []
    for task in sorted(tasks):
        rows = entries(task, 6, seed=5)
        own = str(answer_of(rows[0]))
        pairs += [(task, text, row) for text in {*CONSTANTS, own, re.sub(r"[1-9]", "0", own)} for row in rows]
    paid = collections.defaultdict(float)
    for (task, text, _), score in zip(pairs, scores([(text, row) for _, text, row in pairs]), strict=True):
        paid[task, text] += (score or 0.0) / 6
    assert {key: share for key, share in paid.items() if share > 0.9} == {}


@pytest.mark.slow
def test_every_task_is_scored_as_the_library_does():
    """Right answers, those of other rows, numbers and rubbish; where the library fails on an answer, it is wrong."""
    pairs, expected = [], []
    for task in sorted(set(DATASETS) - {"composite"}):
        verifier, rows = gym.get_score_answer_fn(task), entries(task)
        for entry, other in zip(rows, rows[1:] + rows[:1], strict=True):
            for answer in (answer_of(entry), answer_of(other), "17", "rubbish (", ""):
                answer, own = str(answer).strip(), copy.deepcopy(entry)
                if task in ("arc_agi", "rearc"):
                    own["metadata"]["output"] = tuple(map(tuple, own["metadata"]["output"]))
                try:
                    score = (
                        verifier(answer=answer, entry=own) if task not in EXACT else float(answer == entry["answer"])
                    )
                    if task == "puzzle24" and answer != str(answer_of(entry)).strip():
                        score = 0.0  # where the library does not compare the numbers
                except Exception:
                    score = 0.0
                pairs.append((answer, entry))
                expected.append(score)
    found = scores(pairs)
    unequal = [
        (entry["metadata"]["source_dataset"], answer, score, found_)
        for (answer, entry), score, found_ in zip(pairs, expected, found, strict=True)
        if found_ != pytest.approx(score)
    ]
    assert unequal == []
    assert expected.count(1.0) > 2 * (len(DATASETS) - 5)


MARK = "GRPO_EXT_MARK"
HOSTILE = (
    "open({path!r}, 'w').write('x')",
    "[open({path!r}, 'w').write('x')]",
    "(lambda: open({path!r}, 'w').write('x'))()",
    "__import__('os').system('touch {path}')",
    "[__import__('pathlib').Path({path!r}).touch()]",
    "exec(\"open({path!r}, 'w')\")",
    "eval(\"open({path!r}, 'w')\")",
    "sympify(\"open({path!r}, 'w')\")",
    "S(\"open({path!r}, 'w')\")",
    "Symbol('x').__class__.__init__.__globals__['__builtins__']['open']({path!r}, 'w')",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'FileIO'][0]({path!r}, 'w')",
    "[f'{{open({path!r}, 1 and chr(119))}}']",
    "preview(x, output='dvi', filename={path!r})",
    "__import__('os').environ[{mark!r}]",
    "[setattr(__import__('sys').modules['reasoning_gym.dataset'].ProceduralDataset, 'score_answer', lambda *a: 1.0)]",
    "[setattr(c, 'score_answer', lambda *a, **k: 1.0) for c in "
    "__import__('reasoning_gym').dataset.ProceduralDataset.__subclasses__()]",
    "[setattr(__import__('grpo_ext.rewards.library.functions').rewards.library.functions, '_verify', lambda *a: 1.0)]",
    "[setattr(__import__('builtins'), 'float', lambda *a: 1.0)]",
    "[__import__('os').write(i, b'1.0') for i in range(3, 64)]",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('os')._exit(0)",
)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Hostile answers; none of them may have left a mark in the end."""
    monkeypatch.setenv(MARK, "1.0")
    path, before = tmp_path / "mark", {name: c.score_answer for name, (c, _) in DATASETS.items()}
    number = float
    yield [text.format(path=str(path), mark=MARK) for text in HOSTILE]
    assert not path.exists()
    assert float is number
    assert {name: c.score_answer for name, (c, _) in DATASETS.items()} == before


def pairs_of(task, answers):
    """Answers to one row, then a wrong and a right one."""
    [entry] = entries(task, 1)
    return [(text, entry) for text in (*answers, "1", answer_of(entry))]


def judged(tasks, answers):
    """The scores of the answers and of a wrong one to each task, where the right one is paid."""
    found = scores([pair for task in tasks for pair in pairs_of(task, answers)])
    width = len(answers) + 2
    assert found[width - 1 :: width] == [1.0] * len(tasks)
    return [score for i, score in enumerate(found) if i % width != width - 1]


def test_no_answer_is_executed_nor_moves_another_verdict(hostile):
    for tasks, answers in ((EVALUATED + PARSED, hostile), (COMPUTED, hostile[::5])):
        assert max(judged(tasks, answers)) <= 0.1  # what the library gives for an answer that it cannot read


@pytest.mark.slow
@pytest.mark.parametrize("task", ["string_insertion", "countdown"])
def test_nor_in_this_process_nor_in_an_environment(task, hostile):
    [entry] = entries(task, 1)
    [reward] = Runtime([RewardSpec("gym", "reasoning_gym", kwargs={"extract": "text"})], workers=0).functions
    pairs = pairs_of(task, hostile)
    found = reward(completions=[text for text, _ in pairs], reasoning_gym_entry=[json.dumps(e) for _, e in pairs])
    assert max(found[:-1]) <= 0.05
    assert found[-1] == 1.0
    play = environments["retry"](reward="reasoning_gym", attempts=3)
    play.reset({"reasoning_gym_entry": json.dumps(entry)})
    assert play.step({"role": "assistant", "content": hostile[1]}).reward is None
    assert play.step({"role": "assistant", "content": hostile[14]}).reward is None
    assert play.step({"role": "assistant", "content": "1"}).reward <= 0.05


WITHOUT_THE_GRAMMAR = {"module.eval = _evaluated": "pass", "_WALL_SECONDS = 12.0": "_WALL_SECONDS = 0.5"}
BREAKING_OUT = (
    "[__import__('os').kill(pid, 9) for pid in (__import__('os').getppid(),)]",
    "[__import__('os').kill(pid, 9) for pid in range(2, 99)]",
    "__import__('ctypes').CDLL(None).kill(-1, 9)",
    "[exec('import os\\nfor fd in range(64):\\n try: os.write(fd, b\"1.0\")\\n except OSError: pass')]",
    "[__import__('os').fork() for _ in range(99)]",
    "__import__('ctypes').CDLL(None).ptrace(16, __import__('os').getppid(), 0, 0)",
    "[open(n + '.py', 'w').write('1/0') for n in ('reasoning_gym', 'sympy', 'json')]",
    "[setattr(c, 'score_answer', lambda *a, **k: 1.0) for c in __import__('sys').modules"
    "['reasoning_gym.dataset'].ProceduralDataset.__subclasses__()]",
    "__import__('time').sleep(60)",
)


@pytest.mark.parametrize("method", sandbox.METHODS[:2])
def test_an_answer_that_were_executed_would_reach_only_its_own_verdict(method, monkeypatch, hostile):
    """The second wall, with the first taken away."""
    run = sandbox.run
    try:
        assert run("print(1)", method=method).ok
    except sandbox.SandboxError:
        pytest.skip(f"no {method} here")

    def without_the_grammar(source, **options):
        for before, after in WITHOUT_THE_GRAMMAR.items():
            assert before in source
            source = source.replace(before, after)
        return run(source, **{**options, "method": method})

    monkeypatch.setattr(sandbox, "run", without_the_grammar)
    monkeypatch.setattr("grpo_ext.rewards.library.verifiers.CPU_SECONDS", 2)
    [entry] = entries("string_insertion", 1)
    wrong, executed = "list('ABCD')", f"list({entry['answer']!r})"
    answers = [text for attack in (*BREAKING_OUT, *hostile) for text in (attack, wrong, executed)]
    found = judged(["string_insertion"], answers)
    assert set(found[1:-1:3]) == {0.0}
    assert set(found[2:-1:3]) == {0.1}  # the library's score of a list: the answers were executed


DRESSED = [
    ("simple_integration", "Integral({integrand}, {variable})", 0.0),
    ("simple_integration", "integrate({integrand}, {variable}) + C", 0.0),
    ("simple_integration", "{answer} + constant", 1.0),
    ("simple_integration", "sin({variable})**2 + cos({variable})**2 + {answer}", 1.0),
    ("intermediate_integration", "Integral({integrand}, {variable}) + 1", 0.0),
    ("intermediate_integration", "integrate({integrand}, {variable})", 0.0),
    ("polynomial_multiplication", "expand({polynomial_expr})", 0.0),
    ("polynomial_multiplication", "({polynomial_expr}).expand()", 0.0),
    ("polynomial_multiplication", "Poly({polynomial_expr}).as_expr()", 0.0),
    ("polynomial_multiplication", "{polynomial_expr}", 0.0),
]


def test_a_question_that_sympy_would_answer_is_no_answer():
    pairs, expected = [], []
    for task, answer, right in DRESSED:
        rows = entries(task)
        pairs += [(answer.format(answer=entry["answer"], **entry["metadata"]), entry) for entry in rows]
        expected += [(task, answer, right)] * len(rows)
    found = [(*row[:2], score) for row, score in zip(expected, scores(pairs), strict=True)]
    assert found == expected


def test_countdown_sees_every_number():
    metadata = {"source_dataset": "countdown", "numbers": [3, 5], "target": 2008}
    entry = {"question": "", "answer": "", "metadata": metadata}
    free = ("0x7d0", "2_000", "2e3", "2000", "pi/pi*2e3", "E", "(9).__class__(2000)", "x - x + 2e3")
    assert max(scores([(f"{number}+3+5", entry) for number in free])) <= 0.05
    assert scores([("3+5", {**entry, "metadata": {**metadata, "target": 8}})]) == [1.0]


@pytest.mark.slow
def test_an_answer_that_never_ends_is_wrong_and_costs_the_others_nothing(monkeypatch):
    monkeypatch.setattr("grpo_ext.rewards.library.verifiers.CPU_SECONDS", 1)
    bombs = {
        "countdown": "9**9**9**9",
        "simple_integration": "(x+y+z)**9**9",
        "coin_flip": "1e999999999",
        "rubiks_cube": "R999999999",
        "string_insertion": "[" * 100_000,
        "bitwise_arithmetic": "9" * 10_000,
        "polynomial_multiplication": "+".join(["x"] * 50_000),
    }
    begun = time.monotonic()
    found = scores([pair for task, bomb in bombs.items() for pair in pairs_of(task, [bomb])])
    assert time.monotonic() - begun < 60
    assert None not in found
    assert max(found[0::3]) <= 0.01
    assert set(found[2::3]) == {1.0}


def test_a_car_that_moves_forever_is_stopped(monkeypatch):
    monkeypatch.setattr("grpo_ext.rewards.library.verifiers.CPU_SECONDS", 1)
    [entry] = entries("rush_hour", 1)
    moves = " ".join(f"{car}{way}9999999999" for car in "ABCDEFGH" for way in "+-")
    assert scores([(moves, entry), ("A+1", entry)]) == [0.0, 0.01]


def test_only_an_entry_makes_a_score_none():
    [right], [flip] = entries("prime_factorization", 1), entries("coin_flip", 1)
    assert scores([("two times three", right), (right["answer"], right)]) == [0.0, 1.0]
    assert scores([("1", entries("boxnet", 1)[0]), ("9" * 4000, flip)]) == [0.0, 0.0]
    broken = {**right, "answer": "no factors"}, {**flip, "answer": 1}, "{}", "[" * 9999
    assert scores([("2", entry) for entry in broken]) == [None] * 4


def test_an_entry_of_any_depth_ends_nothing():
    """Between what JSON reads and what it writes again lie some ten levels."""
    [flip] = entries("coin_flip", 1)
    for depth in range(800, 1010):
        deep = json.dumps(flip)[:-1] + f', "deep": {"[" * depth}{"]" * depth}}}'
        assert scores([("x", deep)]) == [None]


@pytest.mark.parametrize("value", [None, "many", 10**400, math.nan])
def test_a_verifier_that_returns_no_number_fails(value, monkeypatch):
    monkeypatch.setattr("grpo_ext.rewards.library.verifiers.verifier", lambda task: lambda **_: value)
    assert scores([("1", entries("chain_sum", 1)[0])]) == [None]


def test_nan_is_at_no_distance_from_an_answer():
    rows = entries("complex_arithmetic")
    assert scores([(text, row) for text in ("nan", "NaN + nani") for row in rows]) == [0.0] * 4
    assert scores([(row["answer"], row) for row in rows]) == [1.0] * 2


def test_an_integral_that_sympy_cannot_solve_is_no_answer_either():
    """Where the row's own answer is the question; the solution by hand is paid."""
    metadata = {"source_dataset": "intermediate_integration", "integrand": "x**2*cos(x)", "variable": "x"}
    row = {"question": "", "answer": "Integral(x**2*cos(x), x) + C", "metadata": metadata}
    right = "x**2*sin(x) + 2*x*cos(x) - 2*sin(x) + C"
    assert scores([(row["answer"], row), (right, row)]) == [0.0, 1.0]


def test_where_no_sandbox_is_to_be_had_such_a_task_is_refused_and_nothing_runs(monkeypatch, tmp_path):
    from grpo_ext.data.config import DataConfig, dataset_problems

    def unavailable(level="isolated"):
        raise sandbox.SandboxError("namespaces: denied")

    monkeypatch.setattr(sandbox, "available", unavailable)
    for task in (*EVALUATED, *PARSED, *COMPUTED, *MOVED):
        [problem] = dataset_problems(DataConfig(), f"reasoning_gym/{task}")
        assert problem.field == "dataset_name"
        assert "namespaces: denied" in str(problem)
    assert dataset_problems(DataConfig(), "reasoning_gym/chain_sum") == []
    path, [entry] = tmp_path / "mark", entries("string_insertion", 1)
    with pytest.raises(sandbox.SandboxError, match="namespaces: denied"):
        scores([(f"[open({str(path)!r}, 'w')]", entry)])
    assert not path.exists()
    assert scores([("7", entries("chain_sum", 1)[0])]) != [None]


WATCHED = ("exec", "compile", "import", "open", "subprocess.Popen", "os.system", "pickle.find_class", "socket.connect")
_events = None


def _watch(event, arguments):
    if _events is not None and event in WATCHED:
        _events.append((event, str(arguments)[:200]))


@pytest.mark.slow
def test_a_verifier_outside_of_the_sandbox_executes_and_opens_nothing(hostile):
    """Of whichever version is installed: a verifier that is new and executes is found here."""
    global _events
    sys.addaudithook(_watch)
    from grpo_ext.rewards.library.verifiers import needs_sandbox

    outside = [task for task in sorted(set(DATASETS) - {"composite"}) if not needs_sandbox(task)]
    assert len(outside) > 80
    assert {*EVALUATED, *PARSED, *COMPUTED, *MOVED} == set(DATASETS) - {*outside, "composite"}
    seen = {}
    for task in outside:
        [entry] = entries(task, 1)
        answers = [str(answer_of(entry)), *hostile, "1e999999999", "[[1]]", '{"a": 1}', "nan"]
        scores([(text, entry) for text in answers])  # what is loaded once is loaded now
        _events = []
        found = scores([(text, entry) for text in answers])
        seen[task], _events = _events, None
        assert all(score is not None and math.isfinite(score) for score in found), task
    assert {task: events for task, events in seen.items() if events} == {}
    assert os.environ[MARK] == "1.0"


READING = ("accuracy", "multiple_choice", "json_schema", "format", "code_format", "repetition", "reasoning_steps")
TRLS = ("accuracy_reward", "reasoning_accuracy_reward")


def test_no_other_reward_executes_a_text(hostile):
    """In LaTeX, in JSON and bare, beside a number, a sum and a letter as the right answer."""
    global _events
    sys.addaudithook(_watch)
    dressed = [form.format(text) for text in hostile for form in ("{}", "\\boxed{{{}}}", "$\\frac{{{}}}{{2}}$")]
    texts = [f"<think>\na\n</think>\n<answer>\n{text}\n</answer>" for text in (*dressed, *map(json.dumps, hostile))]
    schema = {"type": ["string", "array"], "format": "regex", "pattern": "^(a|b)*$"}
    for solution in ("\\boxed{72}", "$x^2 + 1$", "B"):
        columns = {"solution": [solution] * len(texts), "schema": [schema] * len(texts)}
        given = {"completions": [[{"role": "assistant", "content": text}] for text in texts], **columns}
        for name in (*READING, *TRLS):
            rewards[name](**given)  # what is loaded once is loaded now
            _events = []
            found = rewards[name](**given)
            seen, _events = _events, None
            of_solution = ("exec", "compile") if name in TRLS else ()  # TRL has math-verify parse it for each row
            assert [event for event in seen if event[0] not in of_solution] == [], name
            assert len(found) == len(texts)
