"""What `check`, `diagnose` and the report say that sampling beside training would bring, by the times in a log."""

import pytest

from grpo_ext.trainer.diagnosis.overlap import StepSeconds, advice, step_seconds

SERVER = {"use_vllm": True, "vllm_mode": "server"}
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}
ON_CPU = {"use_cpu": True}
ON_GPU = {"use_cpu": False}
ON_TWO_GPUS = {"rollout_engine": "process", "rollout_device": "cuda:1"}


def log(rollout: float, rewards: float, training: float, **others: float) -> list[dict]:
    """Two steps of warm-up, which do not count, and two of these times."""
    times = {"rollout": rollout, "rewards": rewards, "training": training} | others
    late = {f"time/{part}": seconds for part, seconds in times.items()}
    return [{"step": 1, "time/rollout": 99.0, "time/training": 99.0}, {"step": 1}, late, {"step": 2}, late]


@pytest.mark.parametrize(
    ("seconds", "apart", "shared"),
    [
        (StepSeconds(rollout=3, scoring=0, training=3), 3, 6),  # balanced: half the time, if there are two devices
        (StepSeconds(rollout=3, scoring=0, training=1), 3, 4),
        (StepSeconds(rollout=1, scoring=2, training=2), 3, 3),  # a judge hides behind training on any device
        (StepSeconds(rollout=1, scoring=4, training=2), 5, 5),
        (StepSeconds(rollout=3, scoring=0, training=3, push=1), 4, 7),  # a push comes between the windows
    ],
)
def test_a_step_that_overlaps_takes_its_longer_side(seconds, apart, shared):
    for device, least in ((False, apart), (True, shared)):
        assert seconds.overlapped(shared=device) == least
        assert seconds.gain(shared=device) == sum(seconds) / least


def test_times_are_means_behind_the_warm_up():
    found = step_seconds(log(3.0, 0.5, 2.0, environments=1.0, weight_push=0.25))
    assert found == StepSeconds(rollout=3.0, scoring=1.5, training=2.0, push=0.25)


def test_steps_without_rollouts_count():
    """Two optimizer steps for each generation, logged one by one."""
    one = {"time/rollout": 4.0, "time/rewards": 0.0, "time/training": 2.0}
    assert step_seconds([one, one | {"time/rollout": 0.0}] * 2) == StepSeconds(2.0, 0.0, 2.0)


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        (log(3.0, 0.2, 3.0), SERVER, "Rollouts and rewards take 3.2 s and training 3 s of a step: with"),
        (log(3.0, 0.2, 3.0), SERVER, "about 3.2 s, 1.9 times faster."),
        (log(3.0, 0.2, 3.0), ON_TWO_GPUS, "about 3.2 s, 1.9 times faster."),
        (log(3.0, 0.2, 3.0), ON_CPU, "1.9 times faster, if the sampler has free cores."),
        (log(30.0, 0.0, 1.0), SERVER, "overlap would bring little, 31 s would become about 30 s, 1.0 times faster."),
        (log(3.0, 0.0, 3.0), COLOCATED, "on the same device: overlap would not pay there. With devices of its own"),
        (log(3.0, 0.0, 3.0), ON_GPU, "on the same device: overlap would not pay there. With devices of its own"),
        (log(1.0, 2.0, 2.0), COLOCATED, "would hide 2 s of rewards and environments: about 3 s, 1.7 times faster;"),
    ],
)
def test_the_forecast_depends_on_the_devices(rows, settings, words):
    assert words in advice(rows, settings)


@pytest.mark.parametrize(
    ("waited", "rollout", "words"),
    [
        (0.1, 3.0, "take 3 s, and training waited 0.1 s for them. Training is the bottleneck: a faster"),
        (2.0, 3.0, "The sampler or the rewards are the bottleneck: more devices or cores for them, or shorter"),
    ],
)
def test_a_run_with_overlap_names_its_slower_side(waited, rollout, words):
    figures = {"overlap/waited": waited, "overlap/rollout_seconds": rollout}
    assert words in advice([row | figures for row in log(waited, 0.0, 3.0)], SERVER)


@pytest.mark.parametrize("rows", [[], [{"step": 1, "reward": 0.5}], [{"time/training": None}]])
def test_without_times_there_is_no_advice(rows):
    assert advice(rows, SERVER) is None
