"""The SLURM scripts, run by bash with stand-ins for SLURM's commands and for the launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_ext.recipe.files import recipes_folder
from grpo_ext.recipe.launching import accelerate_config

SCRIPTS = sorted((recipes_folder() / "slurm").glob("*.sbatch"))
EACH = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then tr , "\\n" <<< "$3"; else echo "$@" > "$CALLS/scontrol"; fi',
    "srun": 'echo "$@" >> "$CALLS/srun"\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=0 exec "$@"',
    "accelerate": 'printf \'%s\\n\' "$@" > "$CALLS/accelerate"\n'
    'if [ "$CODE" -ne 0 ]; then echo "$CODE" > "$GRPO_EXT_EXIT_CODE_FILE"; exit 1; fi',
    "grpo-ext": "exec sleep 300",
}


@pytest.fixture
def submitted(tmp_path):
    """Run a script as a job on nodes; its exit code, and the arguments of what it called."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    for folder in (programs, calls):
        folder.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)

    def submit(script: Path, nodes: str, *arguments: str, code: int = 0, **environment: str):
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        job = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "20007", "CALLS": str(calls), "CODE": str(code)}
        env = os.environ | job | environment | {"PATH": path}
        with (tmp_path / "log").open("w") as log:  # no pipe, which a server's process would hold open
            command = ["bash", str(script), *arguments]
            done = subprocess.run(command, cwd=tmp_path, env=env, stdout=log, stderr=log, timeout=250)
        return done.returncode, {file.name: file.read_text().splitlines() for file in calls.iterdir()}

    return submit


@EACH
def test_a_script_is_bash_and_shows_how_it_is_submitted(script):
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert script.read_text().startswith("#!/bin/bash\n")
    assert f" {script.name} " in script.read_text().partition("#SBATCH")[0]


def test_all_nodes_train_where_no_server_has_one(submitted):
    script = recipes_folder() / "slurm" / "train_colocate.sbatch"
    code, calls = submitted(script, "a,b", "my recipe", "--seed", "3", SLURM_GPUS_ON_NODE="4")
    assert code == 0
    launch = ["launch", "--config_file", str(accelerate_config("ddp")), "--num_machines", "2", "--num_processes", "8"]
    launch += ["--machine_rank", "0", "--main_process_ip", "a", "--main_process_port", "20007"]
    assert calls["accelerate"] == [*launch, "-m", "grpo_ext.train", "--config", "my recipe", "--seed", "3"]
    assert "--nodes=2 --ntasks=2" in calls["srun"][0]
    assert "scontrol" not in calls


def test_the_last_node_serves_where_vllm_is_a_server(submitted):
    code, calls = submitted(recipes_folder() / "slurm" / "train.sbatch", "a,b,c", "r", GPUS_PER_NODE="4")
    assert code == 0
    given = dict(zip(calls["accelerate"][1::2], calls["accelerate"][2::2], strict=False))
    assert (given["--num_machines"], given["--num_processes"], given["--main_process_ip"]) == ("2", "8", "a")
    assert calls["accelerate"][-6:-4] == ["--vllm_server_host", "c"]
    assert any("--nodelist=c grpo-ext serve --config r --host c" in call for call in calls["srun"])


@pytest.mark.cases(1)
@EACH
@pytest.mark.parametrize("code", [2, 75])
def test_a_run_that_is_not_finished_is_requeued(submitted, script, code, tmp_path):
    ended, calls = submitted(script, "a,b", "r", code=code)
    assert ended == code
    assert calls.get("scontrol") == (["requeue 20007"] if code == 75 else None)
    assert not list(tmp_path.glob(".grpo-ext-exit-*"))


def test_a_job_without_a_recipe_says_so(submitted, tmp_path):
    assert submitted(recipes_folder() / "slurm" / "train_colocate.sbatch", "a") == (2, {})
    assert "Name a recipe" in (tmp_path / "log").read_text()
