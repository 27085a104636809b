"""Three advantages of your own that look beyond the rewards: at tokens, at columns of the data, at log-probabilities.

Use one in a recipe:  advantage_estimator: examples.token_advantages:surprising

An estimator asks by name for what it needs; the names are at the top of `grpo_ext.objective.advantages`. It returns
[groups, completions], or an advantage for each token, [groups, completions, time].
"""

from collections.abc import Mapping

from torch import Tensor

from grpo_ext.objective.advantages import none


def first_uses(rewards: Tensor, completion_ids: Tensor, completion_mask: Tensor) -> Tensor:
    """r - mean of the group, on the first use of each token in a completion only: repetition earns nothing."""
    equal = completion_ids[..., :, None] == completion_ids[..., None, :]
    seen_before = (equal & completion_mask.bool()[..., None, :]).tril(diagonal=-1).any(dim=-1)
    return none(rewards)[..., None] * ~seen_before * completion_mask


def longer_sums_count_more(rewards: Tensor, columns: Mapping[str, list]) -> Tensor:
    """(r - mean of the group) times the digits of the solution; `columns` has a value for each group."""
    digits = rewards.new_tensor([len(solution) for solution in columns["solution"]])
    return none(rewards) * digits[:, None]


def surprising(rewards: Tensor, per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    """(r - mean of the group) (1 - p): a token that was certain anyway learns nothing."""
    return none(rewards)[..., None] * (1 - per_token_logps.exp()) * completion_mask
