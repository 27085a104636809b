"""Runs that get a signal or lose a process: checkpoint, message, exit code, and no process is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from grpo_ext.errors import NOT_FINISHED
from support import tiny
from support.processes import ENVIRONMENT, PATIENCE, launcher, start_forked

pytestmark = pytest.mark.slow
TESTS = Path(tiny.__file__).parents[1]
STEPS = 200
ENDS = 300
"""Seconds within which a run that got a signal ends, on a busy machine."""


def _default_signals() -> None:
    """Reset signals that the parent of the tests may ignore (nohup, a background job of a script)."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """A run of a slow recipe; `forked` where its imports are not what is tested."""

    def __init__(self, folder: Path, start: list[str], forked: bool, **changes):
        self.folder, self.out, self.temp = folder, folder / "out", folder / "temp"
        self.temp.mkdir(exist_ok=True)
        recipe = tiny.TRAINING | {
            "model_name_or_path": tiny.save(folder / "model"),
            "dataset_name": "quickstart/addition",
            "reward_funcs": [{"name": "support.slow_rewards:slow", "isolate": True}],
            "reward_workers": 1,
            "output_dir": str(self.out),
            "max_steps": STEPS,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "save_strategy": "no",
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"SLOW_SIGN": str(folder / "sign"), "PYTHONPATH": path, "TMPDIR": str(self.temp), "HF_HOME": str(folder)}
        self.log = folder / f"log{time.time_ns()}"
        line = [*start, "--config", str(folder / "recipe.yaml")]
        if forked:
            [self.process] = start_forked(line, self.log, **env)
            return
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *line],
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT | env,
                start_new_session=True,
                preexec_fn=_default_signals,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, holds, seconds=PATIENCE):
        """Wait until something holds, while the run lives."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, self.text[-6000:]
            assert time.monotonic() < deadline, self.text[-6000:]
            time.sleep(0.05)

    def training(self, step=2):
        sign = self.folder / "sign"
        self.until(lambda: sign.exists() and (sign.read_text() or "0") >= str(step))
        return self

    def processes(self) -> list[psutil.Process]:
        """Return the processes of this run, by a variable of their environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLOW_SIGN") == str(self.folder / "sign") and process.status() != "zombie":
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        trains = [p for p in self.processes() if "grpo_ext.train" in p.cmdline() and "RANK" in p.environ()]
        return sorted(trains, key=lambda p: p.environ()["RANK"])

    def ended(self, seconds=ENDS) -> int:
        return self.process.wait(seconds)

    def nothing_left(self, seconds=60, folders=False):
        """Wait until no process is left; check that no folders are, unless `folders`."""
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, [p.cmdline() for p in left]
            time.sleep(0.2)
        assert folders or not list(self.temp.glob("grpo_ext_*")), list(self.temp.iterdir())

    def kill(self):
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()


ALONE = ["-m", "grpo_ext.train"]
COMMAND = ["-m", "grpo_ext.commands.cli", "train"]
TWO = [*COMMAND, "--num_processes", "2"]
ACCELERATE = [*launcher()[1:], "-m", "grpo_ext.train"]


@pytest.fixture
def start(tmp_path):
    runs = []

    def begin(how, forked=True, **changes):
        runs.append(Run(tmp_path, how, forked, **changes))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def saved(run, name) -> int:
    """Return the step of the one checkpoint, after checking that the run's message names it."""
    [folder] = run.out.glob("checkpoint-*")
    step = json.loads((folder / "trainer_state.json").read_text())["global_step"]
    assert f"{name}: saved checkpoint-{step} of {STEPS} steps. Run the same command to resume." in run.text
    assert "Model saved" not in run.text
    assert not (run.out / "model.safetensors").exists()
    return step


SIGNALLED = [
    (ALONE, signal.SIGTERM),
    (ALONE, signal.SIGINT),
    (COMMAND, signal.SIGTERM),
    (TWO, signal.SIGINT),
    (ACCELERATE, signal.SIGTERM),
]


@pytest.mark.parametrize(("how", "number"), SIGNALLED)
@pytest.mark.cases(3)
def test_a_signal_saves_a_checkpoint_and_exits_with_75(how, number, start):
    """`accelerate launch` forwards SIGTERM, but has an exit code of its own."""
    run = start(how, forked=how is not ACCELERATE).training()
    run.process.send_signal(number)
    code = run.ended()
    assert code != 0 if how is ACCELERATE else code == NOT_FINISHED, run.text[-4000:]
    assert saved(run, number.name) >= 2
    assert how is not ALONE or "Traceback" not in run.text, run.text[-6000:]
    run.nothing_left()


BESIDE = {
    "ahead": (ALONE, {"rollout_ahead": 2}),
    "ahead, two processes, of which one gets it": (TWO, {"rollout_ahead": 2}),
}


@pytest.mark.parametrize("case", BESIDE)
def test_what_samples_beside_the_training_ends_with_a_run_that_gets_a_signal(case, start):
    how, settings = BESIDE[case]
    run = start(how, rollout_engine="process", **settings).training()
    samplers = [p for p in run.processes() if "grpo_ext.rollout.process.child" in " ".join(p.cmdline())]
    assert len(samplers) == (2 if how is TWO else 1)
    (run.ranks()[1] if how is TWO else run.process).send_signal(signal.SIGTERM)
    assert run.ended() == NOT_FINISHED, run.text[-4000:]
    if "not waited for, since a signal ends the run" in run.text:  # it came while a generation was awaited
        [folder] = run.out.glob("checkpoint-*")
        assert f"The run can be resumed from {folder}." in run.text
    else:
        assert saved(run, "SIGTERM") >= 2
    assert how is not ALONE or "Traceback" not in run.text, run.text[-6000:]
    run.nothing_left()


EVALUATIONS = {
    "TRL's": ({"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}, 1),
    "eval_sets, before the first step": ({"eval_sets": [{"name": "held", "samples": 4}]}, 0),
}
"""Each of hundreds of batches."""


@pytest.mark.parametrize("case", EVALUATIONS)
def test_two_processes_leave_an_evaluation_together_if_one_of_them_gets_a_signal(case, start):
    settings, step = EVALUATIONS[case]
    run = start(TWO, **settings).training(step)
    began = time.monotonic()
    run.ranks()[1].send_signal(signal.SIGTERM)
    assert run.ended() == NOT_FINISHED, run.text[-6000:]
    print(f"from the signal to the end: {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < 90
    assert [folder.name for folder in run.out.glob("checkpoint-*")] == [f"checkpoint-{step}"] * bool(step)
    run.nothing_left()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_signal_leaves_a_sampler_that_hangs_and_saves_the_last_whole_step(ahead, start):
    run = start(ALONE, rollout_engine="process", rollout_ahead=ahead).training()
    [sampler] = (p for p in run.processes() if "grpo_ext.rollout.process.child" in " ".join(p.cmdline()))
    sampler.send_signal(signal.SIGSTOP)
    run.until(lambda: "The process that samples completions: no sign of life for 8 s. Waiting until" in run.text)
    run.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert run.ended() == NOT_FINISHED, run.text[-4000:]
    print(f"from the signal to the end: {time.monotonic() - began:.1f} s")
    saved(run, "SIGTERM")
    assert "Traceback" not in run.text, run.text[-6000:]
    run.nothing_left()


def test_the_same_command_resumes(start):
    run = start(ALONE, max_steps=6).training(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == NOT_FINISHED
    [folder] = run.out.glob("checkpoint-*")
    again = start(ALONE, max_steps=6)
    assert again.ended(PATIENCE) == 0, again.text[-4000:]
    assert f"Resuming from {folder}" in again.text
    assert "Model saved" in again.text


@pytest.mark.parametrize("how", [ALONE, COMMAND])
def test_a_signal_during_loading_ends_the_run_at_once(how, start):
    run = start(how, forked=False)
    run.until(lambda: any("libtorch" in m.path for m in psutil.Process(run.process.pid).memory_maps()))
    run.process.send_signal(signal.SIGINT)
    assert run.ended(60) == NOT_FINISHED
    assert run.text.strip().splitlines()[-1].startswith("SIGINT before the first step")
    assert "Traceback" not in run.text


@pytest.mark.parametrize("how", [ALONE, TWO])
def test_a_second_signal_ends_the_run_at_once_and_cleans_up(how, start, monkeypatch):
    monkeypatch.setenv("SLOW_SECONDS", "500")
    run = start(how).training(0)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.ended(60) == 128 + signal.SIGTERM
    run.nothing_left()


def test_a_signal_that_nohup_ignores_stays_ignored(start):
    shell = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    shell += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    run = start(["-c", shell, *ALONE], forked=False, max_steps=4).training(1)
    run.process.send_signal(signal.SIGHUP)
    assert run.ended(PATIENCE) == 0


@pytest.mark.parametrize("victim", ["launcher", "command"])
def test_ranks_end_when_their_launcher_or_command_is_killed(victim, start):
    """The launcher survives `grpo-ext train`, its parent."""
    run = start(TWO).training()
    ranks = run.ranks()
    assert len(ranks) == 2
    (psutil.Process(ranks[0].ppid()) if victim == "launcher" else run.process).kill()
    psutil.wait_procs(ranks, timeout=ENDS)
    run.nothing_left(ENDS, folders=victim == "command")
    assert "The launcher is gone: saved checkpoint-" in run.text


def test_a_lost_rank_ends_the_others_within_ddp_timeout(start):
    """10 s, and the 30 that a launcher gives the stopped one; with accelerate's default it would be half an hour."""
    run = start(TWO, ddp_timeout=10).training()
    began = time.monotonic()
    run.ranks()[1].send_signal(signal.SIGSTOP)
    assert run.ended() != 0
    assert time.monotonic() - began < 10 + 30 + 120
    assert run.process.returncode == NOT_FINISHED
    assert "Rank 0 has lost another process: one was killed or stopped, hangs" in run.text, run.text[-5000:]
    assert "ddp_timeout=10 s" in run.text
    run.nothing_left()


def test_a_second_run_into_one_folder_is_refused(start):
    run = start(ALONE).training(0)
    second = start(ALONE)
    assert second.ended(PATIENCE) == 2
    assert f"another run writes there (process {run.process.pid} on " in second.text
    assert "Loading" not in second.text
    run.process.kill()
    run.ended()
    third = start(ALONE, max_steps=1)
    assert third.ended(PATIENCE) == 0, third.text[-3000:]


def test_the_next_run_removes_the_folders_of_a_killed_one(start):
    run = start(ALONE).training(0)
    run.process.kill()
    run.ended()
    assert list(run.temp.glob("grpo_ext_worker_*"))
    again = start(ALONE, max_steps=1)
    assert again.ended(PATIENCE) == 0, again.text[-3000:]
    again.nothing_left()


def test_all_processes_leave_a_reward_that_hangs_on_the_one_that_gets_a_signal(start):
    reward = {"func": "support.slow_rewards:hangs_on_the_first_rank", "isolate": True}
    settings = {"reward_funcs": [reward], "max_steps": 5, "ddp_timeout": 600}
    run = start(TWO, **settings)
    run.until(Path(f"{run.folder / 'sign'}.hung").exists)
    began = time.monotonic()
    assert run.ended() == NOT_FINISHED, run.text[-6000:]
    assert time.monotonic() - began < 90, run.text[-6000:]
    run.nothing_left()
    assert [folder.name for folder in run.out.glob("checkpoint-*")] == ["checkpoint-2"]
    again = start(TWO, **settings)
    assert again.ended() == 0, again.text[-6000:]
    steps = [
        json.loads(line)["step"] for line in (run.out / "metrics.jsonl").read_text().splitlines() if "loss" in line
    ]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5]
