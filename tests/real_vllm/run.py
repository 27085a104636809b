"""One training run with vLLM: `run.py OUTPUT SETTINGS_AS_JSON`; the faults that the tests ask for are set here."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import torch

torch.set_num_threads(1)

import tiny  # noqa: E402
from grpo_ext import GRPOExtConfig, GRPOExtTrainer  # noqa: E402
from grpo_ext.rollout import client  # noqa: E402
from grpo_ext.train import leave_process_group  # noqa: E402


def kill_server(port: int) -> None:
    """-9 to every process of the server at `port`."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "vllm.entrypoints.openai.api_server" in command and str(port) in command:
            for victim in [*process.children(recursive=True), process]:
                victim.send_signal(signal.SIGKILL)


def die_while_generating(trainer, at: int) -> None:
    ask = client.Client._ask
    state = {"done": False}

    def ask_and_kill(self, request):
        if state.get("generating") and not state["done"] and trainer.state.global_step >= at:
            state["done"] = True

            def request_then_kill(send=request):
                outcome = client.attempted(send)
                time.sleep(0.1)
                kill_server(trainer.args.vllm_server_port)
                attempt = outcome.get()
                if attempt.error is not None:
                    raise attempt.error
                return attempt.value

            return ask(self, request_then_kill)
        return ask(self, request)

    generate = client.Client.generate

    def generate_and_tell(self, *args, **kwargs):
        state["generating"] = True
        try:
            return generate(self, *args, **kwargs)
        finally:
            state["generating"] = False

    client.Client._ask, client.Client.generate = ask_and_kill, generate_and_tell


def die_while_receiving(trainer, at: int) -> None:
    client.BUCKET_BYTES = 4096  # many messages for a tiny model
    iterate = trainer.vllm_generation._iter_named_params
    state = {"done": False}

    def tensors():
        for i, pair in enumerate(iterate()):
            sending = trainer.accelerator.is_main_process and trainer.vllm_generation._weight_metadata is not None
            if i == 5 and sending and not state["done"] and trainer.state.global_step >= at:
                state["done"] = True
                kill_server(trainer.args.vllm_server_port)
            yield pair

    trainer.vllm_generation._iter_named_params = tensors


def main(output: Path, settings: dict) -> None:
    arguments = tiny.TRAINING | {
        "use_vllm": True,
        "vllm_mode": settings["mode"],
        "vllm_server_port": settings.get("port", 8000),
        "vllm_group_port": settings.get("group_port", 51216),
        "vllm_server_timeout": 90.0,
        "learning_rate": 3e-3,
        "loss_type": "grpo",
        "vllm_gpu_memory_utilization": 0.1,
        "rollout_drift_action": "stop",
    }
    peft = None
    if settings.get("lora"):
        from peft import LoraConfig

        peft = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOExtTrainer(
        settings["model"],
        [tiny.count_a],
        args=GRPOExtConfig(str(output / "out"), **(arguments | settings.get("config", {}))),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=peft,
    )
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    if settings.get("sync") is False:
        trainer.vllm_generation.sync_weights = lambda: None
    if "die_while_generating" in settings:
        die_while_generating(trainer, settings["die_while_generating"])
    if "die_while_receiving" in settings:
        die_while_receiving(trainer, settings["die_while_receiving"])
    try:
        trainer.train(resume_from_checkpoint=settings.get("resume"))
    finally:
        rank = os.environ.get("RANK", "0") if settings["mode"] == "server" else trainer.accelerator.process_index
        (output / f"ended_{rank}").write_text(str(time.time()))
        if trainer.accelerator.is_main_process:
            (output / "log.json").write_text(json.dumps(trainer.state.log_history))
    if peft is not None:
        changed = [n for n, p in trainer.model.named_parameters() if n in before and not torch.equal(p, before[n])]
        assert not changed, changed
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
