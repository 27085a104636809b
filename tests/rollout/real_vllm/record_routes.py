"""Record vLLM's routes on a CPU by vLLM's own recorder: `python record_routes.py MODEL FILE`."""

import json
import sys
from pathlib import Path

import numpy as np
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10]]
TOKENS = 9
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "skip_tokenizer_init": True}


def main(model: str, file: str) -> None:
    engine = LLM(model, **OPTIONS)
    network = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    capturer, steps, rows = RoutedExpertsCapturer(64, engine.llm_engine.vllm_config), [], []
    bind_routed_experts_capturer(network, capturer)
    network.register_forward_hook(lambda *call: steps.append(capturer.snapshot_routing_data(len(call[2])).numpy()))
    for seed, prompt in enumerate(PROMPTS):
        steps.clear()
        params = SamplingParams(max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False, seed=seed)
        [answer] = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        [completion], routes = answer.outputs, np.concatenate(steps)
        logps = [next(iter(one.values())).logprob for one in completion.logprobs]
        rows.append((prompt, list(completion.token_ids), logps, str(routes.dtype), routes.tolist()))
    Path(file).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
