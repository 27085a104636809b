"""A sampler beside the policy that is a dictionary of copies of the model, in this process."""

import copy
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from grpo_ext.rollout.decoding import picked
from grpo_ext.rollout.samplers import Sampled


class Copies:
    """Samples by copies of a model, a row at a time and without a cache, so that a row depends on nothing else.

    Args:
        policy: returns the model, whose weights `publish` copies.
        ends: tokens that end a completion.
        seconds: how long a request takes at least.
    """

    def __init__(self, policy: Callable[[], torch.nn.Module], ends, temperature=1.0, seconds=0.0):
        self.policy, self.ends, self.temperature, self.seconds = policy, set(ends), temperature, seconds
        self.models, self.published, self.forgotten, self.asked = {}, [], [], []
        self.closed = threading.Event()

    @property
    def versions(self):
        return frozenset(self.models)

    def publish(self, version, weights=None):
        self.published.append(version)
        self.models[version] = as_plain(self.policy())
        if weights is not None:
            self.models[version].load_state_dict(weights)

    def copy_of(self, version):
        return self.models[version].state_dict()

    def sample(self, version, contexts, limits, streams, images=None):
        self.asked.append((version, len(contexts)))
        if self.closed.wait(self.seconds):
            raise RuntimeError("the sampler was closed")
        model = self.models[version]
        return [
            sampled(model, context, stream.random(limit), self.ends, self.temperature)
            for context, limit, stream in zip(contexts, limits, streams, strict=True)
        ]

    def forget(self, version):
        self.forgotten.append(version)
        self.models.pop(version, None)

    def paused(self):
        return nullcontext()

    def close(self):
        self.closed.set()


def as_plain(model):
    """A copy in which nothing trains; an adapter's weights are merged."""
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    for module in copied.modules():
        vars(module).pop("forward", None)  # of accelerate or TRL, which would run the model's own weights
    return copied.merge_and_unload() if hasattr(copied, "merge_and_unload") else copied


@torch.no_grad()
def sampled(model, context, uniforms, ends, temperature=1.0) -> Sampled:
    ids, logps = [], []
    for uniform in uniforms:
        logits = model(input_ids=torch.tensor([[*context, *ids]])).logits[0, -1:].float() / temperature
        probabilities = logits.softmax(dim=-1)
        token = int(picked(probabilities, torch.tensor([uniform])))
        ids.append(token)
        logps.append(float(probabilities[0, token].log()))
        if token in ends:
            break
    return Sampled(ids, logps, None)


def slow(seconds):
    """A reward that takes its time."""

    def reward(completions, **_):
        time.sleep(seconds)
        return [float(len(completion)) for completion in completions]

    return reward


calls = []


def stuck_at_the_second_call(completions, **_):
    """A reward that scores the first batch only."""
    calls.append(len(completions))
    if len(calls) > 1:
        time.sleep(600)
    return [float(len(completion)) for completion in completions]
