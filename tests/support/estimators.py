"""Advantage estimators of a user, named by path."""

from grpo_ext.objective.advantages import group


def everything(
    rewards,
    completion_mask,
    completion_ids,
    per_token_logps,
    old_per_token_logps,
    sampling_per_token_logps,
    ref_per_token_logps,
    entropies,
    columns,
):
    """Keep all there is to see, and return the group's advantages."""
    everything.seen.append({name: value for name, value in locals().items() if name != "rewards"})
    return group(rewards)


everything.seen = []


def median(rewards):
    """r - median of the group: a sound baseline, with which a member of a group has no advantage."""
    return rewards - rewards.nanmedian(dim=-1, keepdim=True).values
