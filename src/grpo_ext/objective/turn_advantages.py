r"""Estimators of credit by turn: rewards of a trajectory's turns to advantages [groups, completions, time].

Beside the tensors of all estimators (see `advantages`) these are offered, each None where completions have no turns:

- `turn_rewards` [groups, completions, turns]: the reward of a turn, NaN where there is none. The rest of a
  completion's reward (a reward for the whole of it, a KL in the reward) belongs to its last turn;
- `turns` [groups, completions, time]: the turn that sampled a token, -1 for other tokens;
- `states` [groups, completions, turns]: the environment's state at each turn; equal numbers are equal states.
"""

from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_ext.objective.advantages import LogMetric, Rewards, estimators, evened, group, none, only_signal
from grpo_ext.objective.options import Ddof, NotNegative, Within

TurnRewards = Float[Tensor, "groups completions turns"]
TurnOfToken = Int[Tensor, "groups completions time"]
States = Int[Tensor, "groups completions turns"]
TokenAdvantages = Float[Tensor, "groups completions time"]
Discount = Annotated[float, Within(least=0.0, most=1.0, because="a return that grows with its distance has no bound")]


def returns_to_go(rewards: Rewards, turn_rewards: TurnRewards, gamma: float) -> TurnRewards:
    r"""G_t = r_t + gamma G_(t+1); after the last turn, the last G. NaN where a completion could not be scored."""
    exists = ~turn_rewards.isnan()
    last = (exists.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    number = torch.arange(turn_rewards.shape[-1], device=last.device)
    earlier = torch.where(exists & (number < last), turn_rewards, 0.0)
    rest = (rewards - earlier.sum(dim=-1))[..., None]
    pays = torch.where(number == last, rest, earlier)
    reversed_returns, following = [], torch.zeros_like(rewards)
    for t in reversed(range(len(number))):
        following = torch.where(number[t] <= last[..., 0], pays[..., t] + gamma * following, following)
        reversed_returns.append(following)
    returns = torch.stack(reversed_returns[::-1], dim=-1)
    return returns.gather(-1, torch.minimum(number.expand_as(returns), last))


def _largest(rewards: Rewards, turn_rewards: TurnRewards) -> Float[Tensor, " groups"]:
    """Return the largest absolute reward of each group, which bounds the rounding of its returns."""
    every = torch.cat([rewards[..., None], turn_rewards], dim=-1).flatten(1)
    return every.nan_to_num(nan=0.0).abs().amax(dim=-1)


def on_tokens(values: TurnRewards, turns: TurnOfToken) -> TokenAdvantages:
    """Put a turn's value on each token that it sampled, 0 on the others."""
    return torch.where(turns >= 0, values.gather(-1, turns.clamp(min=0)), 0.0)


@estimators.register("turn_return", group_baseline=False)
def turn_return(
    rewards: Rewards,
    turn_rewards: TurnRewards | None = None,
    turns: TurnOfToken | None = None,
    *,
    gamma: Discount = 1.0,
    ddof: Ddof = 1,
    eps: NotNegative = 1e-4,
) -> TokenAdvantages | Rewards:
    r"""(G_t - mean) / (std + eps) on the tokens of turn t, G_t = r_t + gamma G_(t+1): `group` of the returns.

    Mean and std are those of the group's returns at the same turn, where a completion that has ended
    counts with its last. Where only last turns pay and gamma is 1 this is `group`, bit for bit.
    """
    if turn_rewards is None or turns is None:
        return group(rewards, ddof=ddof, eps=eps)
    at_turn = returns_to_go(rewards, turn_rewards, gamma).movedim(-1, 1).contiguous()
    largest = _largest(rewards, turn_rewards).repeat_interleave(at_turn.shape[1])
    returns = evened(at_turn.flatten(0, 1), largest)
    values = only_signal(group(returns, ddof=ddof, eps=eps), returns)
    return on_tokens(values.view_as(at_turn).movedim(1, -1), turns)


@estimators.register("gigpo", group_baseline=False)
def gigpo(
    rewards: Rewards,
    turn_rewards: TurnRewards | None = None,
    turns: TurnOfToken | None = None,
    states: States | None = None,
    log_metric: LogMetric | None = None,
    *,
    gamma: Discount = 0.95,
    step_weight: NotNegative = 1.0,
    scale: bool = True,
    ddof: Ddof = 1,
    eps: NotNegative = 1e-4,
) -> TokenAdvantages | Rewards:
    r"""A^E + step_weight A^S_t on the tokens of turn t: of the episode, `group`; of the step, among equal states.

    A^S_t = (G_t - mean) / (std + eps) over all turns of the group that began in the same state, in any
    completion; 0 where no other did. G_t = r_t + gamma G_(t+1). Without `scale` neither part is divided by a std,
    which is the default of the authors' code (`mode: mean_norm`); here the default is to divide, as `group` does.
    The default gamma of 0.95 is that of their scripts.
    A completion without turns is one turn from the group's one state. Logs `advantages/shared_states`, the share of
    turns whose state another turn of the group has. GiGPO, arXiv:2505.10978.
    """

    def normalised(values: Rewards) -> Rewards:
        return only_signal(group(values, ddof=ddof, eps=eps), values) if scale else none(values)

    episode = normalised(rewards)
    if turn_rewards is None or turns is None or states is None:
        return episode + step_weight * episode
    returns = returns_to_go(rewards, turn_rewards, gamma)
    largest = _largest(rewards, turn_rewards)
    of_group = torch.arange(len(states), device=states.device)[:, None, None].expand_as(states)
    valid = ~turn_rewards.isnan() & ~returns.isnan()
    step = torch.zeros_like(returns)
    kinds = torch.stack([of_group[valid], states[valid]]).unique(dim=1, return_inverse=True)[1]
    if log_metric is not None and len(kinds):
        log_metric("advantages/shared_states", (kinds.bincount()[kinds] > 1).double().mean().item())
    place = valid.nonzero(as_tuple=True)
    for kind in range(int(kinds.max()) + 1 if len(kinds) else 0):
        alike = tuple(axis[kinds == kind] for axis in place)
        step[alike] = normalised(evened(returns[alike][None], largest[alike[0][:1]]))[0]
    return on_tokens(episode[..., None] + step_weight * step, turns)
