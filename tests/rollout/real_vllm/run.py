"""One training run with vLLM: `run.py OUTPUT SETTINGS_AS_JSON`; the faults that the tests ask for are set here."""

import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

torch.set_num_threads(1)

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.errors import RolloutDrift, ServerLost
from grpo_ext.evaluation.evaluate import evaluate
from grpo_ext.rollout.vllm import client
from grpo_ext.train import leave_process_group
from grpo_ext.trainer.checkpoints.processes import whole
from support import seeing, tiny
from support.fsdp_on_cpu import make_fsdp_real
from support.vllm_runs import send_all, server_processes


class Faults:
    """What befalls the server at `settings["server_port"]`: `settings["faults"]` says during what, from which step on.

    "generation", "push" (of weights) and "joining" (the transfer group, after it has come back) can be struck, once
    each, by `settings["signal"]`; a SIGSTOP is followed by a SIGCONT after `settings["hang_seconds"]`, if that is set.
    """

    def __init__(self, trainer, output: Path, settings: dict) -> None:
        self.trainer, self.output, self.settings = trainer, output, settings
        self.due, self.lock = dict(settings.get("faults", {})), threading.Lock()
        trainer.vllm_generation._iter_named_params = self.struck_push(trainer.vllm_generation._iter_named_params)
        client.Client._post = self.struck_request(client.Client._post)

    def strikes(self, during: str) -> bool:
        with self.lock:  # requests come from many threads
            if self.trainer.state.global_step < self.due.get(during, math.inf):
                return False
            del self.due[during]
        return self.trainer.accelerator.is_main_process

    def strike(self, name: str, processes: list) -> None:
        send_all(processes, getattr(signal, name))
        (self.output / "struck").write_text(str(time.time()))
        if "hang_seconds" in self.settings:
            threading.Timer(self.settings["hang_seconds"], send_all, [processes, signal.SIGCONT]).start()

    def struck_push(self, iterate):
        def tensors():
            known = self.trainer.vllm_generation._weight_metadata is not None  # the first round only asks for shapes
            for i, pair in enumerate(iterate()):
                if i == 5 and known and self.strikes("push"):
                    time.sleep(0.1)  # the workers have begun to receive
                    self.strike(self.settings["signal"], server_processes(self.settings["server_port"]))
                yield pair

        return tensors

    def struck_request(self, post):
        def ask(asker, url, **kwargs):
            generating = url.endswith("/v1/completions") and self.strikes("generation")
            joining = url.endswith("/init_weight_transfer_engine") and self.strikes("joining")
            if not generating and not joining:
                return post(asker, url, **kwargs)
            processes = server_processes(self.settings["server_port"])
            if joining:
                send_all(processes, signal.SIGSTOP)  # it joins in no time
            answer = client.in_thread(lambda: post(asker, url, **kwargs))
            time.sleep(0.02)
            send_all(processes, signal.SIGSTOP)  # so that nothing can arrive any more
            time.sleep(0.2)
            if answer.done():  # too quick: it is asked once more, of a server that stands still
                assert generating, f"{url} was answered before the server was struck"
                answer = client.in_thread(lambda: post(asker, url, **kwargs))
                time.sleep(0.2)
            self.strike(self.settings["signal"], processes)
            return answer.result()

        return ask


def bare(trainer, iterate):
    """The weights of a push without the adapter."""

    def tensors():
        with trainer.model.disable_adapter():
            yield from iterate()

    return tensors


def look() -> list:
    """Look."""
    return [{"type": "image", "image": seeing.picture(5, 28, 28)}, {"type": "text", "text": "b"}]


def messages(completions, **_) -> list[float]:
    """A reward: more than two if a turn follows what a tool returned."""
    return [float(len(completion)) for completion in completions]


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
    scored = []

    def count_a(completions, **_):
        scored.append(len(completions))
        return tiny.count_a(completions)

    peft = None
    if settings.get("lora"):
        from peft import LoraConfig

        shape = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        peft = LoraConfig(**shape | (settings["lora"] if isinstance(settings["lora"], dict) else {}))
    if settings.get("bits"):
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(**{f"load_in_{settings['bits']}bit": True})
    rows, processor, reward = settings.get("rows") or tiny.prompts(), tiny.tokenizer(), count_a
    if "pictures" in settings:
        rows, processor, reward = seeing.coloured(16), seeing.processor("idefics3"), seeing.named
        rows = rows.remove_columns("image") if "environments" in settings else rows
        processor.image_seq_len = settings.get("tokens", 1)
        arguments |= {"trust_remote_code": True, "per_device_train_batch_size": 16, "num_generations": 8}
    tools = None
    if "tools" in settings:
        processor.tokenizer.response_template, tools, reward = seeing.CALLS, [look], messages
    trainer = GRPOExtTrainer(
        settings["model"],
        None if "environments" in settings else [reward],
        args=GRPOExtConfig(str(output / "out"), **(arguments | settings.get("config", {}))),
        train_dataset=rows,
        eval_dataset=tiny.prompts(4) if "eval_strategy" in settings.get("config", {}) else None,
        processing_class=processor,
        peft_config=peft,
        quantization_config=settings.get("quantization_config"),
        environments=settings.get("environments"),
        tools=tools,
    )
    if tools:  # rows of the second process have fewer turns
        trainer.max_tool_calling_iterations -= trainer.accelerator.process_index
    before = {n: whole(p) for n, p in trainer.model.named_parameters() if not p.requires_grad}
    if settings["mode"] == "colocate" and trainer.use_vllm:
        sizes = trainer.vllm_generation.llm.llm_engine.vllm_config.scheduler_config
        found = {"batched": sizes.max_num_batched_tokens, "sequences": sizes.max_num_seqs}
        (output / "engine.json").write_text(json.dumps(found))
    if settings.get("sync") is False:
        trainer.vllm_generation.sync_weights = lambda: None
    if settings.get("adapter_pushed") is False:
        trainer.vllm_generation._iter_named_params = bare(trainer, trainer.vllm_generation._iter_named_params)
    if "faults" in settings:
        Faults(trainer, output, settings)
    if "evaluated" in settings:
        chosen = EvalSet("held", samples=2, plays=True, seed=5)
        evaluate(trainer, chosen, settings["evaluated"], kept=output / "samples.jsonl", identity={}, workers=0)
        trainer.close_rewards()
        return
    try:
        trainer.train(resume_from_checkpoint=settings.get("resume"))
    except (RolloutDrift, ServerLost) as error:  # as grpo-ext train ends
        print(error, file=sys.stderr)
        sys.exit(2)
    finally:
        rank = os.environ.get("RANK", "0") if settings["mode"] == "server" else trainer.accelerator.process_index
        (output / f"ended_{rank}").write_text(str(time.time()))
        (output / f"scored_{rank}").write_text(str(sum(scored)))
        if trainer.accelerator.is_main_process:
            (output / "log.json").write_text(json.dumps(trainer.state.log_history))
    if peft is not None:
        after = {n: whole(p) for n, p in trainer.model.named_parameters() if n in before}
        assert after.keys() == before.keys()
        changed = [n for n, p in after.items() if not torch.equal(p, before[n])]
        assert not changed, changed


if __name__ == "__main__":
    make_fsdp_real()
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    finally:
        leave_process_group()
