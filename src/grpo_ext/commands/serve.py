"""`grpo-ext serve`: start the vLLM server of a recipe, with the flags that the recipe requires."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlparse

import requests
import torch
from trl.import_utils import is_vllm_available

from grpo_ext.child_processes import kill_group
from grpo_ext.config.adapters import is_adapter
from grpo_ext.config.engine_options import given_options
from grpo_ext.config.launch import planned_processes
from grpo_ext.config.truncation import scores_over_support
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.loading import base_path, load_tokenizer, model_path
from grpo_ext.recipe.model_checks import inspect_policy
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.rollout.vllm.gloo import BACKEND
from grpo_ext.rollout.vllm.plugin import whole_prompts
from grpo_ext.rollout.vllm.requester import most_logprobs
from grpo_ext.rollout.vllm.server import PROBE, ServerFacts
from grpo_ext.warden import die_with_parent

STOP_SECONDS = 20.0


def server_url(recipe: Recipe) -> str:
    """Return the address at which the trainer looks for its server."""
    c = recipe.training
    return c.vllm_server_base_url or f"http://{c.vllm_server_host}:{c.vllm_server_port}"


def transfer_engine(recipe: Recipe, slots: Mapping[str, Any]) -> str:
    """Return `vllm_weight_transfer`, with `auto` resolved for this machine; adapters, in `slots`, go by gloo."""
    asked = recipe.training.vllm_weight_transfer
    by_nccl = torch.cuda.is_available() and not on_cpu(recipe) and not slots
    return asked if asked != "auto" else "nccl" if by_nccl else BACKEND


def adapter_slots(recipe: Recipe) -> dict[str, Any]:
    """Return the options by which the server has room for the adapters of a run that pushes them."""
    if recipe.training.vllm_push == "merged" or not (recipe.model.use_peft or is_adapter(model_path(recipe))):
        return {}
    return inspect_policy(recipe.model, recipe.training)[0].slots


def on_cpu(recipe: Recipe) -> bool:
    """Return whether the trainer has no GPU."""
    return bool(recipe.training.use_cpu) or not torch.cuda.is_available()


def sampler_dtype(recipe: Recipe) -> str:
    """Return `vllm_dtype`, with `auto` resolved to the trainer's dtype, which TRL defaults to float32."""
    dtype = recipe.training.sampler_dtype
    return dtype if dtype != "auto" else recipe.model.dtype or "float32"


def sequence_length(recipe: Recipe) -> int | None:
    """Return the largest number of tokens of prompt and completion; None: the model's limit."""
    c = recipe.training
    if c.vllm_max_model_length is not None:
        return c.vllm_max_model_length
    prompt = recipe.data.max_prompt_length
    return None if prompt is None else prompt + int(c.max_completion_length or 0)


def wanted(recipe: Recipe) -> ServerFacts:
    """Return the recipe's requirements of its server."""
    c, dtype, slots = recipe.training, sampler_dtype(recipe), adapter_slots(recipe)
    with_support = scores_over_support(c)
    tokenizer: Any = load_tokenizer(recipe)
    prompt = recipe.data.max_prompt_length
    return ServerFacts(
        model=base_path(recipe),
        max_model_len=c.max_completion_length if prompt is None else prompt + int(c.max_completion_length or 0),
        dtype=None if dtype == "auto" else dtype,
        logprobs_mode="processed_logprobs" if c.sampler_rules or c.old_logps != "recomputed" or with_support else None,
        max_logprobs=most_logprobs(c.top_k) if with_support else None,
        weight_transfer=transfer_engine(recipe, slots),
        **{"max_loras": 0} | slots,
        loads_adapters=True if slots else None,
        routes=c.replay_routes or None,
        probe_ids=tuple(tokenizer.encode(PROBE, add_special_tokens=False)),
    )


def command(recipe: Recipe, host: str, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Return the server's command line; `extra` is passed to vLLM unchanged."""
    c, slots = recipe.training, adapter_slots(recipe)
    flags: dict[str, Any] = {
        "--model": base_path(recipe),
        "--host": host,
        "--port": port,
        "--dtype": sampler_dtype(recipe),
        "--max-model-len": sequence_length(recipe),
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": most_logprobs(c.top_k) if scores_over_support(c) else None,
        "--max-lora-rank": slots.get("max_lora_rank"),
        "--max-loras": slots.get("max_loras"),
        "--weight-transfer-config": json.dumps({"backend": transfer_engine(recipe, slots)}),
        "--tensor-parallel-size": c.vllm_tensor_parallel_size,
        "--gpu-memory-utilization": c.vllm_gpu_memory_utilization,
        "--model-impl": c.vllm_model_impl,
        "--revision": recipe.model.model_revision,
        "--seed": c.seed,
    }
    options = given_options(c)
    if on_cpu(recipe):
        options = {**whole_prompts(sequence_length(recipe), options), **options}
    switches = {"--enforce-eager": on_cpu(recipe), "--enable-lora": slots, "--trust-remote-code": c.trust_remote_code}
    switches["--enable-return-routed-experts"] = c.replay_routes
    switches["--enable-scale-out"] = is_vllm_available("0.30.0")  # takes images beside tokens
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in flags.items():
        line += [name, str(value)] if value is not None else []
    line += [name for name, on in switches.items() if on]
    return [*line, *_flags(options), *extra]


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line that set options of the engine."""
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif value is not None:
            yield from (f"--{name}", value if isinstance(value, str) else json.dumps(value))


def environment(recipe: Recipe) -> dict[str, str]:
    """Return the server's environment: endpoints of weights enabled; on a CPU a small cache unless one is set."""
    added = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if on_cpu(recipe):
        added["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    return os.environ | added


def run_server(recipe: Recipe, host: str, port: int | None, extra: Sequence[str] = (), *, hint: str) -> int:
    """Run the server until Ctrl-C, which returns 0, or until it ends by itself, which returns its exit code or 1.

    A port of None is the recipe's; `extra` are flags of vLLM; `hint` is printed when the server is up.

    Raises:
        ConfigError: another program listens at the port.
    """
    port = port or urlparse(server_url(recipe)).port or recipe.training.vllm_server_port
    here = "127.0.0.1" if host == "0.0.0.0" else host
    with suppress(OSError), socket.create_connection((here, port), timeout=5):
        cure = "Stop it, or name another port here (--port) and for the trainer (--vllm_server_port)."
        raise ConfigError([Problem("vllm_server_port", port, "another program listens there", cure)])
    line = command(recipe, host, port, extra)
    print(f"Starting vLLM: {' '.join(line[3:])}", flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(
            f"Warning: anyone who can reach {host}:{port} can query the model and replace its weights: vLLM's "
            "development endpoints have no password. Keep the port behind a firewall.",
            flush=True,
        )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleans up as after Ctrl-C
    end = partial(die_with_parent, os.getpid(), signal.SIGTERM)
    process = subprocess.Popen(line, env=environment(recipe), start_new_session=True, preexec_fn=end)
    try:
        if _wait_until_healthy(process, f"http://{here}:{port}"):
            print(f"vLLM is up. In another terminal:\n\n    {hint}\n\nCtrl-C stops it.", flush=True)
        code = process.wait()
        print(f"vLLM has ended by itself, with exit code {code}.", file=sys.stderr)
        return code or 1
    except KeyboardInterrupt:
        print("Stopping vLLM.", flush=True)
        return 0
    finally:
        process.send_signal(signal.SIGINT)
        kill_group(process, STOP_SECONDS)


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str) -> bool:
    """Return True when the server is up, False if it ended instead."""
    while process.poll() is None:
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return True
        time.sleep(1)
    return False


def run(options: argparse.Namespace) -> int:
    """Start the recipe's vLLM server and wait for its end."""
    if find_spec("vllm") is None:
        cure = "Install it (pip install 'grpo-ext[vllm]'), or train without a server: transformers generates then."
        raise ConfigError([Problem("grpo-ext serve", ABSENT, "it starts vLLM, which is not installed", cure)])
    host, port, overrides = options.host, options.port, ["--use_vllm", "true", "--vllm_mode", "server"]
    with planned_processes(launch_of(options.keys).planned, here=True):
        recipe = load_recipe([*options.keys, *overrides])
    hint = " ".join(["grpo-ext train", *options.keys, *overrides])
    if host != "127.0.0.1":
        hint += f" --vllm_server_host {socket.gethostname() if host == '0.0.0.0' else host}"
    if port is not None:
        hint += f" --vllm_server_port {port}"
    return run_server(recipe, host, port, options.extra, hint=hint)
