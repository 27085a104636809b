"""Trajectories whose contexts are extended, stripped, summarised, begun anew or sampled from twice."""

import random

import numpy as np

from grpo_ext.objective.trajectory import Trajectory, Turn, batch

FIRST, LAST = 3, 40
"""Tokens with no meaning of their own."""
EOS = 1


def ids(r: random.Random, n: int) -> list[int]:
    return [r.randrange(FIRST, LAST) for _ in range(n)]


def rewritten(r: random.Random, prompt: list[int], history: list[int]) -> list[int]:
    """The context of a next turn."""
    behind = history[len(prompt) :]
    return r.choice(
        [
            history,
            history,
            prompt + [token for token in behind if token % 3],  # thinking stripped
            prompt[:1] + ids(r, 2) + behind[-2:],  # a summary
            ids(r, 3),  # a sub-agent
            prompt,  # another try
        ]
    )


def trajectory(r: random.Random, prompt: list[int], turns: int, truncated: bool = False) -> Trajectory:
    made: list[Turn] = []
    history = list(prompt)
    for number in range(turns):
        sampled = ids(r, r.randint(1, 4)) + [EOS] * (number < turns - 1 or not truncated)
        made.append(Turn(history, sampled, [-3 * r.random() for _ in sampled], reward=r.randrange(3) / 2))
        history = rewritten(r, prompt, history + sampled + ids(r, r.randint(0, 2)))
    return Trajectory(made, truncated=truncated)


def groups(seed: int = 0, prompts: int = 2, size: int = 4) -> list[Trajectory]:
    r = random.Random(seed)
    each = [prompt for prompt in [ids(r, 5 + n) for n in range(prompts)] for _ in range(size)]
    return [trajectory(r, prompt, r.randint(1, 5)) for prompt in each]


def padded(trajectories: list[Trajectory]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids, attention mask, parents, and which tokens of the completions were sampled."""
    rows = batch(trajectories, {EOS})
    left, right = (max(map(len, column)) for column in (rows.prompt_ids, rows.completion_ids))
    found, mask = (np.zeros((len(trajectories), left + right), int) for _ in range(2))
    parents, sampled = np.tile(np.arange(-1, right - 1), (len(mask), 1)), np.zeros_like(mask[:, left:])
    for i, made in enumerate(trajectories):
        row = rows.prompt_ids[i] + rows.completion_ids[i]
        columns = slice(left - len(rows.prompt_ids[i]), left + len(rows.completion_ids[i]))
        found[i, columns], mask[i, columns] = row, 1
        parents[i, : len(made.tree.parents)] = made.tree.parents
        sampled[i, : len(rows.tool_mask[i])] = rows.tool_mask[i]
    return found, mask, parents, sampled
