"""What a sampler beside the training cannot sample is refused: a process's and a vLLM server's."""

import pytest

from grpo_ext import GRPOExtConfig
from grpo_ext.config.process_engine import image_problems, rollout_problems, samples_by_server

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 8, "num_generations": 8}
SERVER = {"use_vllm": True, "vllm_mode": "server"}
CASES = {
    "a process": ({"rollout_engine": "process"}, True),
    "a server with overlap": ({**SERVER, "overlap": "step"}, True),
    "a server": (SERVER, False),
    "neither": ({}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_rollouts_of_the_training_process_and_images_are_refused_beside_it(case, tmp_path):
    settings, refused = CASES[case]
    config = GRPOExtConfig(str(tmp_path), **CPU, **settings)
    found = [*rollout_problems(config, {"rollout_func": print, "tools": None}), *image_problems(config, ["image"])]
    assert len(found) == (2 if refused else 0)
    assert not [*rollout_problems(config, {"tools": None}), *image_problems(config, ["prompt"])]


def test_a_server_samples_beside_the_training_only_with_overlap(tmp_path):
    found = [samples_by_server(GRPOExtConfig(str(tmp_path), **CPU, **settings)) for settings, _ in CASES.values()]
    assert found == [False, True, False, False]
