"""Replace empty completions, on which stock TRL crashes."""

from collections.abc import Callable


def fill_empty(completion_ids: list[list[int]], logprobs: list | None, eos_token_id: int) -> None:
    """Make each empty completion one end-of-sequence token, in place."""
    for i, ids in enumerate(completion_ids):
        if not ids:
            completion_ids[i] = [eos_token_id]
            if logprobs is not None:
                logprobs[i] = [None]  # unknown to the sampler: TRL then applies no correction


def without_empty_completions(rollout_func: Callable[..., dict], eos_token_id: int) -> Callable[..., dict]:
    """Return `rollout_func` with its empty completions filled."""

    def rollout(prompts: list, *args: object) -> dict:
        output = rollout_func(prompts, *args)
        if "completion_ids" in output:
            fill_empty(output["completion_ids"], output.get("logprobs"), eos_token_id)
        return output

    return rollout
