"""What a sampler beside the training cannot sample is refused: a process's and a vLLM server's."""

import pytest
from datasets import Dataset

from grpo_ext import GRPOExtConfig
from grpo_ext.config.ahead import ahead_problems
from grpo_ext.config.images import image_problems
from grpo_ext.config.process_engine import rollout_problems, samples_by_server
from grpo_ext.config.warnings import warnings
from grpo_ext.errors import ConfigError

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 8, "num_generations": 8}
SERVER = {"use_vllm": True, "vllm_mode": "server"}
CASES = {
    "a process": ({"rollout_engine": "process"}, 2),
    "a server, ahead": ({**SERVER, "rollout_ahead": 1, "max_steps": 2}, 1),
    "a server": (SERVER, 0),
    "neither": ({}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_rollouts_of_the_training_process_are_refused_beside_it_and_images_by_a_process(case, tmp_path):
    settings, refused = CASES[case]
    config = GRPOExtConfig(str(tmp_path), **CPU, **settings)
    found = [*rollout_problems(config, {"rollout_func": print, "tools": None}), *image_problems(config, ["image"])]
    assert len(found) == refused
    assert not [*rollout_problems(config, {"tools": None}), *image_problems(config, ["prompt"])]


def test_a_server_samples_beside_the_training_only_with_rollout_ahead(tmp_path):
    found = [samples_by_server(GRPOExtConfig(str(tmp_path), **CPU, **settings)) for settings, _ in CASES.values()]
    assert found == [False, True, False, False]


@pytest.mark.parametrize(
    "option",
    [{"num_beams": 2}, {"guidance_scale": 1.5}, {"renormalize_logits": True}, {"use_cache": False}, {"max_time": 3.0}],
)
def test_what_the_process_cannot_decode_is_refused_before_it_starts(option, tmp_path):
    settings = {**CPU, "loss_defaults": "trl", "generation_kwargs": option}
    GRPOExtConfig(str(tmp_path), **settings)
    name = next(iter(option))
    with pytest.raises(ConfigError, match=rf"generation_kwargs\.{name}=.* with rollout_engine='process'"):
        GRPOExtConfig(str(tmp_path), **settings, rollout_engine="process")


def test_the_process_may_have_options_of_each_row_by_itself(tmp_path):
    options = {"num_beams": 1, "use_cache": True, "min_new_tokens": 2, "renormalize_logits": False}
    config = GRPOExtConfig(str(tmp_path), **CPU, generation_kwargs=options, rollout_engine="process")
    assert config.generation_kwargs == options


AHEAD = {"rollout_engine": "process", "rollout_ahead": 2, "max_steps": 8}
CORRECTIONS = (
    {"old_logps": "sampler", "vllm_importance_sampling_correction": False},
    {"sampler_correction": [{"level": "token", "upper": 2.0, "action": "truncate"}]},
)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("ahead", "idle"), [(0, True), (2, False)])
def test_a_correction_of_the_sampler_has_an_effect_with_older_weights(ahead, idle, correction, tmp_path):
    config = GRPOExtConfig(str(tmp_path), **CPU, **(AHEAD | correction | {"rollout_ahead": ahead}))
    found = [problem for problem in warnings(config) if "no effect" in problem.reason]
    assert [sorted(problem.field.split(", ")) for problem in found] == ([sorted(correction)] if idle else [])


AHEAD_REFUSED = {
    "the trainer's own engine": ({"rollout_engine": "auto"}, "by a sampler that has older weights"),
    "colocated vLLM": ({"use_vllm": True, "vllm_mode": "colocate"}, "in turn with the training"),
    "stock TRL": ({"loss_defaults": "trl"}, "of its present weights"),
    "no correction": ({"vllm_importance_sampling_correction": False}, "would bias the gradient"),
    "fresh prompts on a server": ({**SERVER, "dynamic_sampling": "reward"}, "has the latest ones only"),
    "other rows": ({"ignore_data_skip": True}, "on other rows"),
    "more than the run": ({"max_steps": 2}, "the run has 2 generations"),
    "a fraction": ({"rollout_ahead": 1.5}, "rollout_ahead"),
    "below 0": ({"rollout_ahead": -1}, "rollout_ahead"),
}


@pytest.mark.parametrize("case", AHEAD_REFUSED)
def test_what_cannot_be_sampled_ahead_is_refused(case, tmp_path):
    settings, words = AHEAD_REFUSED[case]
    with pytest.raises(ConfigError, match=words) as caught:
        GRPOExtConfig(str(tmp_path), **CPU, **(AHEAD | settings))
    assert len(caught.value.problems) == 1


DEVICES = [(None, True), ("cuda", True), ("cuda:0", True), ("cuda:1", False), ("cpu", False)]


@pytest.mark.parametrize(("device", "shared"), DEVICES)
def test_a_sampler_on_the_device_of_the_policy_is_warned_of(device, shared, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_ext.config.process_engine.planning", lambda: True)  # there is no such device here
    for settings in (AHEAD, {"rollout_engine": "process"}):
        config = GRPOExtConfig(str(tmp_path), **(CPU | settings), rollout_device=device)
        assert not [problem for problem in warnings(config) if "one device" in problem.reason]
        config.use_cpu = False
        found = [problem for problem in warnings(config) if "one device" in problem.reason]
        assert len(found) == (shared and len(settings) > 1)


def test_streams_and_short_epochs_cannot_be_sampled_ahead(tmp_path):
    config = GRPOExtConfig(str(tmp_path), **CPU, **(AHEAD | {"max_steps": -1}), num_train_epochs=1)
    rows = Dataset.from_list([{"prompt": "a"}] * 3)
    (stream,) = ahead_problems(config, rows.to_iterable_dataset())
    assert "a stream does not allow" in stream.reason
    assert not [*ahead_problems(config, rows)]
    (short,) = ahead_problems(config, rows.select(range(2)))
    assert "the run has 2 generations" in short.reason


def test_the_plain_ratio_to_the_sampler_is_a_correction(tmp_path):
    config = GRPOExtConfig(str(tmp_path), **CPU, **AHEAD, old_logps="sampler")
    assert config.sampler_rules == ()
    assert samples_by_server(GRPOExtConfig(str(tmp_path), **CPU, **SERVER, rollout_ahead=1))
