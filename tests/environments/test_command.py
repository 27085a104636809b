"""What a program leaves behind neither pays nor fails its episode, and reaches nothing outside of its folder."""

from pathlib import Path

import pytest

from grpo_ext.environments.library.command import Command, CommandFailed
from grpo_ext.environments.protocol import AgentTask

TASK = AgentTask({"prompt": "go"}, "http://127.0.0.1:1/1", "key")


def paid(program: str, test: str | None = None, **options) -> float | None:
    lines = {"run": ["sh", "-c", program], "test": None if test is None else ["sh", "-c", test]}
    return Command(**lines, **options).run(TASK)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def outside(tmp_path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "reward.txt").write_text("1")
    return tmp_path / "outside"


OWN = "echo 1 > reward.txt"


@pytest.mark.parametrize(
    ("program", "test", "reward"),
    [
        (OWN, "false", 0.0),
        (OWN, "kill -9 $$", 0.0),
        (OWN, "echo 0.5 > reward.txt; exit 1", 0.0),
        (OWN, "echo 0.5 > reward.txt", 0.5),
        ("mkdir reward.txt; touch reward.txt/a", "echo 0.5 > reward.txt", 0.5),
        ("mkfifo reward.txt", "echo 0.5 > reward.txt", 0.5),
        ("(setsid sh -c 'cd /; trap \"\" TERM; while :; do echo 1 > {folder}/reward.txt; done' &)",
         "sleep 0.3; echo 0.5 > reward.txt; sleep 0.3", 0.5),
        ("setsid sh -c 'while ! test -s pid; do sleep 0.05; done; kill -9 $(cat pid)' &",
         "echo $$ > pid; sleep 0.4; echo 0.5 > reward.txt", 0.5),
    ],
)  # fmt: skip
def test_only_a_test_that_succeeds_pays(program, test, reward):
    assert paid(program, test, reward="file") == reward


@pytest.mark.parametrize(
    ("program", "test", "status"), [("exit 3", "true", 3), ("true", "exit 4", 4), ("", "true", 0)]
)
def test_the_status_of_the_program_or_else_of_its_test_is_kept(program, test, status):
    command = Command(["sh", "-c", program], test=["sh", "-c", test])
    command.run(TASK)
    assert command.status == status


@pytest.mark.parametrize("program", [OWN, "ln -s {outside}/reward.txt reward.txt", "mkdir x; mv x reward.txt"])
def test_a_reward_file_before_the_test_pays_nothing(program, outside):
    with pytest.raises(CommandFailed, match="no number in reward_file"):
        paid(program.format(outside=outside), "true", reward="file")
    assert (outside / "reward.txt").read_text() == "1"


@pytest.mark.parametrize("made", ["ln -s {outside}/reward.txt", "mkfifo", "ln -s /dev/zero"])
def test_a_reward_file_that_is_no_file_of_its_own_pays_nothing(made, outside):
    with pytest.raises(CommandFailed, match="no number in reward_file"):
        paid(f"{made} reward.txt".format(outside=outside), reward="file")


def test_a_link_in_place_of_a_folder_leads_nowhere(outside):
    linked = f"rm -rf out; ln -s {outside} out"
    options = {"reward": "file", "reward_file": "out/reward.txt"}
    with pytest.raises(CommandFailed, match="no number in reward_file"):
        paid(linked, **options)
    with pytest.raises(CommandFailed, match="no number in reward_file"):
        paid(linked, "true", **options)
    assert (outside / "reward.txt").read_text() == "1"
    files = {"out/reward.txt": "0.25", "out/sub/b": "x"}
    assert paid(linked, "grep -q x out/sub/b", test_files=files, **options) == 0.25
    assert sorted(path.name for path in outside.iterdir()) == ["reward.txt"]
    assert (outside / "reward.txt").read_text() == "1"


def test_files_of_the_test_are_written_after_the_program(outside):
    test, files = ["sh", "check.sh"], {"check.sh": "exit 1"}
    program = f"test ! -e check.sh && ln -s {outside}/reward.txt check.sh && mkdir -p d/e && echo y > f"
    written = Command(["sh", "-c", program], test=test, files={"f": "x"}, test_files=files)
    assert written.run(TASK) == 0.0
    edited = "grep -q y f"  # files of the task are the program's to change
    assert paid("echo y > f", edited, files={"f": "x"}) == 1.0


def test_a_folder_that_was_replaced_pays_nothing(outside):
    with pytest.raises(CommandFailed, match="in place of its folder"):
        paid(f"mv {{folder}} {{folder}}.old; ln -s {outside} {{folder}}", "true", reward="file")


def test_a_program_that_kills_its_warden_pays_nothing(tmp_path):
    with pytest.raises(CommandFailed, match=r"killed by SIGKILL|could not be ended"):
        paid("echo 1 > reward.txt; kill -9 $PPID; sleep 1", reward="file")


def test_a_program_that_prints_without_end_fills_no_disk(tmp_path):
    program = "head -c 30000000 /dev/zero | tr '\\0' x; stat -c %s $TMPDIR/agent.out > reward.txt; echo end"
    agent = Command(["sh", "-c", program], reward="file", env={"TMPDIR": str(tmp_path)})
    assert 0 < agent.run(TASK) <= 4000
    assert agent.output.endswith("xxxend")


@pytest.mark.parametrize("options", [{"test_files": {"a": "b"}}, {"test": ["true"], "test_files": {"../a": "b"}},
                                     {"files": {"": "b"}}, {"test": ["true"], "test_files": {"a": 1}}])  # fmt: skip
def test_files_that_cannot_be_written_are_refused(options):
    assert [p.field for p in Command.option_problems(["true"], **options)] == [list(options)[-1]]
