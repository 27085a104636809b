"""How many groups the policy masters, fails, or can still learn from, by the reward that says what is right."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from grpo_ext.objective.advantages import extremes
from grpo_ext.rewards.protocol import RIGHT, judge


def shares(rewards: Float[Tensor, "groups completions functions"], names: Sequence[str]) -> dict[str, float]:
    """Shares of the groups that the judge could score, which add up to 1; none where it could score no group.

    All right: each completion has a reward of 1 or more. All wrong: none has, and all that were scored have the same.
    Mixed: the rest; also where all are below 1 but not alike, so that partial credit ranks them. A completion that was
    not scored beside others that were is not right, as in an evaluation.
    """
    judged = rewards[..., list(names).index(judge(names))]
    judged = judged[~judged.isnan().all(dim=1)]
    if not len(judged):
        return {}
    highest, lowest = extremes(judged)
    all_right = (judged >= RIGHT).all(dim=1)
    all_wrong = (highest < RIGHT) & (highest == lowest)
    kinds = {"all_right": all_right, "all_wrong": all_wrong, "mixed": ~(all_right | all_wrong)}
    return {f"groups/{kind}": members.double().mean().item() for kind, members in kinds.items()}
