"""The reward names that TRL's own GRPO script knows, so that its recipes run as they are; TRL does the scoring.

TRL reads the first message of a completion, and its content must be text. math-verify takes quadratic time, so that it
gets no more than the end of a text.
"""

from typing import Any

from grpo_ext.rewards.protocol import rewards
from grpo_ext.rewards.text import Completion, completion_text

_LONGEST = 5000  # characters that math-verify reads


def _as_read(completions: list[Completion], longest: int | None = None) -> list[list[dict[str, str]]]:
    """Return the end of the text of each completion's first message, in TRL's form."""
    texts = [
        completion_text(completion if isinstance(completion, str) else completion[:1]) for completion in completions
    ]
    return [[{"role": "assistant", "content": text[-longest:] if longest else text}] for text in texts]


@rewards.register("accuracy_reward", independent=True)
def accuracy_reward(completions: list[Completion], solution: list[str], **columns: Any) -> list[float | None]:
    """TRL's `accuracy_reward`: math-verify on LaTeX answers of conversational completions."""
    from trl.rewards import accuracy_reward as trl_reward

    return trl_reward(completions=_as_read(completions, _LONGEST), solution=solution, **columns)


@rewards.register("reasoning_accuracy_reward", independent=True)
def reasoning_accuracy_reward(
    completions: list[Completion],
    solution: list[str],
    *,
    reasoning_delimiters: list[str] | None = None,
    **columns: Any,
) -> list[float | None]:
    """TRL's `reasoning_accuracy_reward`: the same on what follows the last reasoning delimiter (`</think>`)."""
    from trl.rewards import reasoning_accuracy_reward as trl_reward

    marks = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    read = _as_read(completions)
    for [message] in read:
        if mark := next((mark for mark in marks if mark in message["content"]), ""):
            message["content"] = mark + message["content"].rpartition(mark)[2][-_LONGEST:]
        else:
            message["content"] = ""  # TRL scores it 0
    return trl_reward(completions=read, solution=solution, reasoning_delimiters=marks, **columns)


@rewards.register("think_format_reward", independent=True)
def think_format_reward(completions: list[Completion], **columns: Any) -> list[float]:
    """TRL's `think_format_reward`: 1.0 for `<think>...</think>` at the start, with one `<think>`."""
    from trl.rewards import think_format_reward as trl_reward

    return trl_reward(completions=_as_read(completions), **columns)


@rewards.register("get_soft_overlong_punishment", independent=True)
def soft_overlong_punishment_reward(  # the name under which TRL logs it
    completion_ids: list[list[int]], *, max_completion_len: int = 1280, soft_punish_cache: int = 256, **columns: Any
) -> list[float]:
    """TRL's `get_soft_overlong_punishment`, with the lengths (in tokens) that TRL's script fixes as defaults."""
    from trl.rewards import get_soft_overlong_punishment

    reward = get_soft_overlong_punishment(max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache)
    return reward(completion_ids=completion_ids, **columns)
