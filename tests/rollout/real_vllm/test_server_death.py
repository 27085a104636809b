"""A vLLM server that is killed, hangs or errs in the middle of a run."""

import http.server
import re
import signal
import threading
import time

import pytest
import requests

from grpo_ext.errors import NOT_FINISHED
from support.forks import WITH_VLLM
from support.processes import PATIENCE, start_forked
from support.vllm_runs import DDP, Server, drifts, free_port, send_all, server_processes, steps, train

FLOAT32 = 0.02
STEPS = 3
BATCH = 32
LONG = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,  # with the next two: enough work to be struck in the middle of it
    "max_completion_length": 112,
    "generation_kwargs": {"ignore_eos": True},
    "vllm_server_timeout": 1000.0,
}
AWAY = 60.0
"""Seconds until a server that stays away is given up: more than it takes to join its group on a busy machine."""
GRACE = 60.0
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served(tmp_path_factory, tied):
    server = Server(tmp_path_factory.mktemp("server"), tied)
    yield server
    server.stop()


@pytest.fixture
def address(served):
    """The server runs, or is about to: the trainer waits for it."""
    if served.process is None or served.process.poll() is not None:
        served.start()
    return {"port": served.port, "server_port": served.port, "group_port": free_port()}


def number(path) -> float:
    return float(path.read_text())


def assert_nothing_lost_or_counted_twice(log, output, batch=BATCH, compared=STEPS):
    assert [entry["step"] for entry in steps(log)] == list(range(1, STEPS + 1))
    assert len(drifts(log)) == compared
    assert max(drifts(log)) < FLOAT32
    assert number(output / "scored_0") == STEPS * batch


def test_a_run_outlives_the_death_of_its_server(served, tied, address, tmp_path):
    """During a push it dies twice: once more when it has come back and joins the transfer group."""
    faults = {"push": 1, "joining": 1}
    restarts = served.restarted_after_death(len(faults), pause=1.0)
    starts = served.starts
    log, _, _ = train(tmp_path, "server", tied, **address, faults=faults, signal="SIGKILL", config=LONG)
    restarts.join(1)
    assert not restarts.is_alive()
    assert served.starts == starts + len(faults)
    assert_nothing_lost_or_counted_twice(log, tmp_path)


def test_all_processes_end_when_the_server_stays_away_and_resume_when_it_is_back(served, tied, address, tmp_path):
    served.wait()
    served.compile()
    fault = {"faults": {"generation": 2}, "signal": "SIGKILL", "config": LONG | {"vllm_server_timeout": AWAY}}
    _, said, code = train(tmp_path, "server", tied, launch=DDP, check=False, **address, **fault)
    assert code != 0
    assert f"did not recover within vllm_server_timeout={AWAY:g} s" in said
    for rank in (0, 1):
        assert number(tmp_path / f"ended_{rank}") - number(tmp_path / "struck") < AWAY + GRACE
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert f"resumed from {checkpoint}" in said
    served.process.wait(60)
    served.start()
    again = {"resume": str(checkpoint), "config": LONG}
    log, _, _ = train(tmp_path, "server", tied, launch=DDP, **address, **again)
    assert [entry["step"] for entry in steps(log)] == list(range(1, STEPS + 1))
    assert max(drifts(log)) < FLOAT32


AHEAD = LONG | {"rollout_ahead": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


def test_a_server_that_dies_beside_the_training_gets_weights_and_requests_again(served, tied, address, tmp_path):
    served.wait()
    restarts = served.restarted_after_death(1, pause=1.0)
    fault = {"faults": {"generation": 1}, "signal": "SIGKILL", "config": AHEAD}
    log, _, _ = train(tmp_path, "server", tied, launch=DDP, **address, **fault)
    restarts.join(1)
    assert not restarts.is_alive()
    # only the first generation is of the weights that train on it
    assert_nothing_lost_or_counted_twice(log, tmp_path, batch=16, compared=1)


def test_all_processes_end_when_the_server_beside_their_training_stays_away(served, tied, address, tmp_path):
    served.wait()
    served.compile()
    fault = {"faults": {"generation": 1}, "signal": "SIGKILL", "config": AHEAD | {"vllm_server_timeout": AWAY}}
    _, said, code = train(tmp_path, "server", tied, launch=DDP, check=False, **address, **fault)
    assert code != 0
    assert f"did not recover within vllm_server_timeout={AWAY:g} s" in said
    for rank in (0, 1):
        assert number(tmp_path / f"ended_{rank}") - number(tmp_path / "struck") < AWAY + GRACE


def test_a_run_ends_when_its_server_hangs_for_good(served, tied, address, tmp_path):
    served.wait()
    served.compile()
    fault = {"faults": {"push": 1}, "signal": "SIGSTOP", "config": LONG | {"vllm_server_timeout": AWAY}}
    try:
        _, said, code = train(tmp_path, "server", tied, check=False, **address, **fault)
    finally:
        send_all(server_processes(served.port), signal.SIGCONT)
    assert code != 0
    assert f"did not recover within vllm_server_timeout={AWAY:g} s" in said
    assert number(tmp_path / "ended_0") - number(tmp_path / "struck") < AWAY + GRACE
    assert (tmp_path / "out" / "checkpoint-1").exists()


@pytest.fixture
def erring(served):
    """A proxy before the server that answers the first requests to some paths by itself, with errors."""
    errors = {"/v1/completions": [500, 429, 500], "/update_weights": [500]}

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.forward(requests.get(served.url + self.path))

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if errors.get(self.path):
                self.send_error(errors[self.path].pop())
            else:
                self.forward(requests.post(served.url + self.path, data=body, headers=JSON))

        def forward(self, answer):
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_):
            pass

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield proxy.server_port
    proxy.shutdown()
    proxy.server_close()
    assert not any(errors.values())


def test_a_run_outlives_a_server_that_errs_and_then_hangs_for_a_while(served, erring, tied, address, tmp_path):
    """A push that is refused does not wait for gloo, whose time limit is `vllm_server_timeout`."""
    served.wait()
    fault = {"faults": {"generation": 2}, "signal": "SIGSTOP", "hang_seconds": 7, "config": LONG}
    log, said, _ = train(tmp_path, "server", tied, **(address | {"port": erring}), **fault)
    assert (said.count("answered 500"), said.count("answered 429")) == (3, 1)
    assert 7 < max(entry["step_time"] for entry in steps(log)) < LONG["vllm_server_timeout"] / 4
    assert_nothing_lost_or_counted_twice(log, tmp_path)


def test_a_signal_while_the_server_is_away_saves_the_last_whole_step_at_once(served, address, tmp_path):
    served.wait()
    away = {"output_dir": tmp_path / "out", "max_steps": 500, "save_steps": 1, "vllm_server_timeout": 1000}
    away |= {"vllm_group_port": address["group_port"]}
    line = ["-m", "grpo_ext.train", "--config", served.recipe]
    line += [word for name, value in away.items() for word in (f"--{name}", value)]
    [run] = start_forked(list(map(str, line)), log := tmp_path / "log", modules=WITH_VLLM)
    try:
        until(lambda: (tmp_path / "out" / "checkpoint-2").exists(), run, log)
        send_all(server_processes(served.port), signal.SIGKILL)
        until(lambda: "Waiting up to" in log.read_text(), run, log)
        run.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert run.wait(GRACE) == NOT_FINISHED, log.read_text()[-4000:]
    finally:
        run.kill()
    print(f"from the signal to the end: {time.monotonic() - began:.1f} s")
    assert re.search(r"SIGTERM: saved checkpoint-\d+ of 500 steps. Run the same command to resume.", log.read_text())
    assert "Traceback" not in log.read_text()


def test_a_server_ends_with_the_command_that_started_it(served, address):
    """The last test here: it leaves no server."""
    served.wait()
    served.process.kill()
    served.process.wait(GRACE)
    deadline = time.monotonic() + PATIENCE
    while served.engine_processes_alive():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def until(holds, run, log):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert run.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)
