"""Completions without a token, where stock TRL crashes."""

from collections.abc import Callable
from typing import Any


def fill_empty(completion_ids: list[list[int]], logprobs: list | None, eos_token_id: int) -> None:
    """Make an empty completion one end-of-sequence token; stock TRL crashes looking for its last token."""
    for i, ids in enumerate(completion_ids):
        if not ids:
            completion_ids[i] = [eos_token_id]
            if logprobs is not None:
                logprobs[i] = [None]  # unknown to the sampler: TRL then applies no correction


def without_empty_completions(rollout_func: Callable[..., dict], eos_token_id: int) -> Callable[..., dict]:
    """`rollout_func` with its empty completions filled."""

    def rollout(*args: Any, **kwargs: Any) -> dict:
        output = rollout_func(*args, **kwargs)
        if "completion_ids" in output:
            fill_empty(output["completion_ids"], output.get("logprobs"), eos_token_id)
        return output

    return rollout
