"""Real vLLM on a CPU: tiny models whose heads have the 32 dimensions that its CPU kernels ask for."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import requests

from support.forks import WITH_VLLM
from support.processes import PATIENCE, forked, start_forked

TESTS = Path(__file__).parents[1]
RUN = TESTS / "rollout" / "real_vllm" / "run.py"
DDP = TESTS.parent / "recipes" / "accelerate_configs" / "cpu_ddp.yaml"
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
ENV = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def server_processes(port: int) -> list[psutil.Process]:
    """vLLM's processes, those that others have started first."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "vllm.entrypoints.openai.api_server" in command and str(port) in command:
            return [*process.children(recursive=True), process]
    raise AssertionError(f"no vLLM server at port {port}")


def send_all(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        process.send_signal(number)


class Server:
    """`grpo-ext serve` in a process of its own: a fork whose processes are forks as well, or started as by a script.

    What a script starts in the background ignores Ctrl-C.
    """

    def __init__(self, folder: Path, model: str, forked: bool = True, **settings) -> None:
        self.forked = forked
        self.model, self.port, self.log = model, free_port(), folder / "serve.log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.recipe = folder / "recipe.yaml"
        data = folder / "train.jsonl"
        data.write_text('{"prompt": "a1:", "answer": "1"}\n' * 8)
        recipe = {
            "model_name_or_path": model,
            "dataset_name": str(data),
            "loss_type": "grpo",
            "reward_funcs": ["accuracy"],
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "bf16": False,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_port": self.port,
            "max_completion_length": 64,
        }
        self.recipe.write_text(json.dumps(recipe | settings))
        self.process: subprocess.Popen | None = None
        self.starts, self.stopped = 0, False

    def start(self) -> None:
        self.starts += 1
        serve = ["-m", "grpo_ext.commands.cli", "serve", "--config", str(self.recipe)]
        if self.forked:
            [self.process] = start_forked(serve, self.log, modules=WITH_VLLM, PYTHONWARNINGS="ignore")
            return
        line = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, *serve]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(line, env=ENV, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            try:
                if requests.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-5000:])

    def compile(self) -> None:
        """Have it compile its kernels, which on a busy machine takes longer than a short limit allows."""
        name = requests.get(f"{self.url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
        asked = {"model": name, "prompt": [[3, 4, 5]] * 16, "max_tokens": 16}
        requests.post(f"{self.url}/v1/completions", json=asked, timeout=PATIENCE)

    def engine_processes_alive(self) -> list[str]:
        """Command lines of what still belongs to this server."""
        port = str(self.port)
        found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [" ".join(line) for line in found if "vllm.entrypoints.openai.api_server" in line and port in line]

    def stop(self) -> int:
        """As Ctrl-C does."""
        self.stopped = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE)

    def restarted_after_death(self, times: int, pause: float) -> threading.Thread:
        """A thread that starts the server again, each time `pause` seconds after it has died."""

        def watch() -> None:
            for _ in range(times):
                self.process.wait()
                time.sleep(pause)
                if self.stopped:
                    return
                self.start()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread


def train(
    output: Path, mode: str, model: str, *, launch: Path | None = None, check=True, environment=None, **settings
):
    """Run `run.py` to its end; what it wrote and what it said."""
    output.mkdir(parents=True, exist_ok=True)
    line = [str(RUN), str(output), json.dumps({"mode": mode, "model": model} | settings)]
    done = forked(*line, config=launch, modules=WITH_VLLM, PYTHONWARNINGS="ignore", **(environment or {}))
    said = done.stdout[-12000:]
    assert not check or done.returncode == 0, said
    written = output / "log.json"
    return json.loads(written.read_text()) if written.exists() else None, said, done.returncode


def steps(log):
    return [entry for entry in log if "reward" in entry]


def drifts(log):
    return [entry["sampling/drift_mean"] for entry in steps(log) if "sampling/drift_mean" in entry]
