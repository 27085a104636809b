"""What others wrote can neither steer a terminal nor flood it, whichever command prints it."""

import ast
import contextlib
import io
import json
import logging
import sys
import threading
import unicodedata
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

import grpo_ext
from grpo_ext.tables import Table, show
from grpo_ext.terminal import LINE, WRITE, SafeStream, printable, safe_output
from support import tiny
from support.commands import command
from support.trainers import build

PLANTED = "A\x1b[2J\x1b[31m\x1b]8;;http://x\x07\x1b]52;c;eA==\x07\rB\x9b31m\x7f\u202eC\u2066D\u200eE\u061cF\u2028G\U000e0041H[/]"
LONG = "long" * 500_000
NAME = "m\x1b[2J\r\u202e"
"""Part of a file's name."""
MOST = 200_000
"""Characters that a command may print."""
REWARDS = f"""
def fails(completions, **columns):
    print({PLANTED!r})
    raise ValueError({LONG + PLANTED!r})

def counts(completions, log_extra, **columns):
    log_extra({PLANTED!r}, [{PLANTED!r}] * len(completions))
    return [float(len(set(str(completion)))) for completion in completions]
"""
_BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def steers(character: str) -> bool:
    """Whether a terminal obeys it, or it changes how others are shown, by Unicode's own tables."""
    kind, direction = unicodedata.category(character), unicodedata.bidirectional(character)
    control = kind in ("Cc", "Cs", "Zl", "Zp") and character not in "\n\t"
    return (
        control or direction in _BIDI or character in "\u200e\u200f\u061c" or "\U000e0000" <= character <= "\U000e0fff"
    )


def checked(text: str) -> str:
    assert sorted({ascii(character) for character in text if steers(character)}) == []
    assert len(text) < MOST
    return text


@pytest.fixture
def said(capfd, monkeypatch):
    """Run a command, without pytest's handlers of logs; return its exit code and all that it printed, if harmless."""

    def run(*argv) -> tuple[int, str]:
        monkeypatch.setattr(logging.root, "handlers", [])
        code = command(*argv)
        printed = capfd.readouterr()
        return code, checked(printed.out + printed.err)

    return run


class Project:
    """A folder with a strange name, and in it a model, rewards, and rows whose text and columns are planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir(parents=True)
        tiny.save(folder / "model", max_position_embeddings=1024)
        (folder / "rewards.py").write_text(REWARDS)
        rows = [{"prompt": f"{i}{PLANTED}", "solution": str(i), PLANTED: PLANTED, "note": LONG} for i in range(8)]
        self.write("rows.jsonl", rows)
        self.write("scored.jsonl", [row | {"completion": PLANTED + LONG} for row in rows[:2]])

    def write(self, name, rows):
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def recipe(self, name="recipe.yaml", **changes) -> list[str]:
        """Write a recipe, with changes, and return the arguments that name it."""
        values = tiny.TRAINING | {
            "model_name_or_path": str(self.folder / "model"),
            "dataset_name": str(self.folder / "rows.jsonl"),
            "reward_funcs": [
                {"name": "counts", "func": f"{self.folder}/rewards.py:counts"},
                {"name": PLANTED, "func": f"{self.folder}/rewards.py:fails", "on_error": "none"},
            ],
            "reward_workers": 0,
            "output_dir": str(self.folder / "run"),
        }
        (self.folder / name).write_text(yaml.safe_dump(values | changes))
        return ["--config", str(self.folder / name)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("project") / NAME)


@pytest.fixture(scope="module")
def trained(project):
    """A run's folder, and what the run printed."""
    out, handlers, logging.root.handlers = io.StringIO(), logging.root.handlers, []
    settings = {"log_completions": True, "record_batches": 1, "save_strategy": "steps", "save_steps": 1}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = command("train", *project.recipe(**settings))
    logging.root.handlers = handlers
    assert code == 0
    return project.folder / "run", out.getvalue()


def test_a_run_with_its_table_of_completions_and_a_failing_reward(trained):
    printed = checked(trained[1])
    assert "step 2/2" in printed
    assert "Loading /" in printed
    assert "\u241b[2J" in printed  # ESC of a prompt
    assert "longA\u241b[2J" in printed  # the exception of a reward
    assert "step 1: 4 of 8 completions" in printed


COMMANDS = {
    "check": (0, lambda p: p.recipe()),
    "score": (0, lambda p: [*p.recipe(), "--file", p.folder / "scored.jsonl"]),
    "score --explain 0": (0, lambda p: [*p.recipe(), "--file", p.folder / "scored.jsonl"]),
    "sample --num 2": (0, lambda p: [*p.recipe(), "--output", p.folder / "sampled.jsonl"]),
    "eval --limit 2": (0, lambda p: [*p.recipe(test_size=0.25)]),
    "report": (0, lambda p: [p.folder / "run"]),
    "diagnose": (1, lambda p: [p.folder / "run"]),
    "diagnose --json": (1, lambda p: [p.folder / "run"]),
    "try --greedy": (0, lambda p: [p.folder / "run", "--prompt", PLANTED]),
    "try --compare": (0, lambda p: [p.folder / "run", "--prompt", PLANTED]),
    "merge": (2, lambda p: [p.folder / "run"]),
    "migrate": (1, lambda p: p.recipe()[1:]),
    f"{PLANTED}": (2, lambda p: []),
    f"check --{PLANTED}": (2, lambda p: [*p.recipe(), LONG]),
    "check --loss_type": (
        2,
        lambda p: [PLANTED, *p.recipe(**{PLANTED: LONG, "a": PLANTED, "learning_rate": PLANTED})],
    ),
    "check --max_steps 2": (2, lambda p: p.recipe(**{LONG: 1})),
    "check --max_steps 3": (2, lambda p: p.recipe(environments=[{"name": PLANTED, "path": PLANTED + LONG}])),
    "check --max_steps 4": (2, lambda p: p.recipe(dataset_name=PLANTED + "x", model_name_or_path=PLANTED)),
    "check --max_steps 5": (2, lambda p: p.recipe(prompt_column=PLANTED + LONG, eval_sets=[{"name": PLANTED}])),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("words", COMMANDS, ids=printable)
def test_commands(words, project, trained, said):
    code, rest = COMMANDS[words]
    name, *options = words.split() if words != PLANTED else [PLANTED]
    ended, printed = said(name, *(words.split(" ", 1)[1:] if PLANTED in words else options), *rest(project))
    assert ended == code, printed
    assert printed


class Hostile(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(500)
        self.end_headers()
        self.wfile.write((PLANTED + LONG).encode())

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_answers_of_servers(url, project, said):
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    assert said("check", *project.recipe("server.yaml", **server))[1]
    judge = {"name": "remote", "kwargs": {"url": f"{url}/score", "protocol": "score", "retries": 0}}
    argv = project.recipe("judge.yaml", reward_funcs=[judge])
    code, printed = said("score", *argv, "--file", project.folder / "scored.jsonl")
    assert code == 0, printed
    assert "500" in printed


def test_a_script_of_ones_own(capfd, model_path, tmp_path, monkeypatch):
    """Log handlers that were made before are covered too, while the trainer trains."""
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(sys.stderr)])

    def fails(completions, **_):
        logging.getLogger("theirs").warning(PLANTED)
        print(PLANTED)
        return [1.0] * len(completions)

    trainer = build(model_path, tmp_path, rewards=[fails], max_steps=1)
    capfd.readouterr()  # bars of the libraries that load a model
    trainer.train()
    printed = capfd.readouterr()
    assert "A\u241b[2J" in checked(printed.out)
    assert "A\u241b[2J" in checked(printed.err)
    print("\x1b[0m")
    assert capfd.readouterr().out == "\x1b[0m\n"  # after training, the streams are the script's again


def test_the_traceback_of_an_exception(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(ValueError, match="A") as caught, safe_output():
        raise ValueError(PLANTED + LONG)
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert "Traceback" in checked(capsys.readouterr().err)


# The stream.


class Screen(io.StringIO):
    def isatty(self):
        return True


ORDINARY = "中文 にほん 한국어 العربية עברית हिन्दी ไทย می\u200cخواهم é ñ \U0001f469\u200d\U0001f52c ❤️ 👍🏽 ∑ x²\t→\n"  # noqa: RUF001


@pytest.mark.parametrize(
    ("text", "piped", "on_a_terminal"),
    [
        (ORDINARY, ORDINARY, ORDINARY),
        ("a\rb", "a\u240db", "a\u240db"),
        ("\r 50%|##", "\n 50%|##", "\r 50%|##"),  # a progress bar
        ("\x1b[A\x1b[A", "\u241b[A\u241b[A", "\x1b[A\x1b[A"),
        ("x\x1b[A", "x\u241b[A", "x\u241b[A"),
        ("\x1b[1;31mred", "\u241b[1;31mred", "\x1b[1;31mred\x1b[0m"),  # a colour ends where its text ends
        ("\x1b[2J\x1b[31", "\u241b[2J\u241b[31", "\u241b[2J\u241b[31"),
        ("\x1b]52;c;eA==\x07", "\u241b]52;c;eA==\u2407", "\u241b]52;c;eA==\u2407"),
        ("\u202eabc\udc80\x9b", *["\u27e8U+202E\u27e9abc\u27e8U+DC80\u27e9\u27e8U+009B\u27e9"] * 2),
    ],
)
def test_what_a_stream_writes(text, piped, on_a_terminal):
    for stream, expected in ((io.StringIO(), piped), (Screen(), on_a_terminal)):
        assert SafeStream(stream).write(text) == len(text)
        assert stream.getvalue() == expected


def test_every_character_that_steers_is_escaped():
    steering = [character for character in map(chr, range(0x110000)) if steers(character)]
    assert len(steering) > 6000
    assert [character for character in steering if printable(character) == character] == []


def test_long_lines_and_long_writes_are_cut():
    stream = io.StringIO()
    SafeStream(stream).write(f"before\n{LONG}\nafter\n")
    head, *lines = stream.getvalue().splitlines()
    assert (head, lines[-1], max(map(len, lines))) == ("before", "after", LINE * 3 // 4)
    assert f"[{len(LONG) - LINE:,} of {len(LONG):,} characters left out]" in lines[1]
    stream = io.StringIO()
    SafeStream(stream).write("line\n" * WRITE)
    assert len(stream.getvalue()) < WRITE + 100


def test_tables_hold_plain_text(capsys):
    table = Table(f"head {PLANTED}", title="title")
    table.add_row(f"[red]{PLANTED}[/red]{LONG}")
    show(table, "[link=http://x]")
    printed = checked(capsys.readouterr().out)
    assert "[red]A" in printed
    assert "[link=http://x]" in printed


# Nothing goes around it.

SOURCE = Path(grpo_ext.__file__).parent


def ways_around(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            found |= {"rich" for name in names if name.split(".")[0] == "rich"}
        elif isinstance(node, ast.Attribute) and node.attr in ("__stdout__", "__stderr__", "buffer"):
            found |= {node.attr} if node.attr != "buffer" or "sys.std" in ast.unparse(node.value) else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "os.write":
            found |= {"os.write"} if isinstance(node.args[0], ast.Constant) else set()
    return found


def test_nothing_goes_around_it():
    found = {str(path.relative_to(SOURCE)): ways_around(ast.parse(path.read_text())) for path in SOURCE.rglob("*.py")}
    assert {path: ways for path, ways in found.items() if ways} == {
        "tables.py": {"rich"},
        "trainer/signals.py": {"os.write"},  # of text that is printable
    }
