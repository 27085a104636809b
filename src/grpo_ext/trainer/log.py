"""`Log`: what a trainer logs, in the containers that TRL writes out and empties at each log."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor
from transformers import TrainerState

from grpo_ext.config.images import described
from grpo_ext.errors import without_secrets
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch


@dataclass(frozen=True)
class Log:
    """Figures of training and of evaluations, and the table of completions."""

    figures: Mapping[str, dict[str, list[float]]]
    """TRL's `_metrics`: by mode, the values since the last log, whose mean is logged."""
    table: Mapping[str, Any]
    """TRL's `_logs`."""
    of_rewards: dict[str, list[float]]
    """TRL's `_pending_metrics`: what this process's reward functions have logged of a generation."""
    is_training: Callable[[], bool]
    accelerator: Accelerator

    @property
    def mode(self) -> str:
        """The figures' key now: "train" or "eval"."""
        return "train" if self.is_training() else "eval"

    def add(self, name: str, value: float) -> None:
        """Log a figure."""
        self.figures[self.mode][name].append(value)

    def add_all(self, figures: Mapping[str, float]) -> None:
        """Log figures."""
        for name, value in figures.items():
            self.add(name, value)

    def add_lengths(self, generated: Generated, ends: Collection[int], state: TrainerState) -> None:
        """Log the lengths of the completions of all processes, with `generated` of this one, as TRL does; collective.

        Raises:
            RuntimeError: there are no completions.
        """
        completion_ids, tool_mask = generated.completion_ids, generated.tool_mask
        lengths = [*map(len, completion_ids)] if tool_mask is None else [*map(sum, tool_mask)]
        cut = [ids[-1] not in ends for ids in completion_ids]
        local = torch.tensor([[*map(len, generated.prompt_ids)], lengths, cut], device=self.accelerator.device).T
        prompts, completions, is_cut = self.accelerator.gather(local.contiguous()).unbind(dim=1)
        if not len(completions):
            raise RuntimeError("no completions were generated: see the log of what samples.")
        if self.mode == "train":
            state.num_input_tokens_seen += int((prompts.sum() + completions.sum()).item())
        self.figures[self.mode]["num_tokens"] = [state.num_input_tokens_seen]
        self.add_all(length_figures(completions.float(), is_cut.float()))

    def add_figures_of_rewards(self) -> None:
        """Log what the reward functions of all processes have logged, each as a mean over its values; collective."""
        for name in sorted(set(gather_object(list(self.of_rewards)))):
            mine = self.of_rewards.get(name, [])
            pair = torch.tensor([sum(mine), len(mine)], dtype=torch.float32, device=self.accelerator.device)
            total, count = self.accelerator.gather(pair).view(-1, 2).sum(dim=0).tolist()
            self.add(name, total / count)
        self.of_rewards.clear()

    def add_completions(
        self,
        batch: RolloutBatch,
        prompts: Iterable[Any],
        advantages: Sequence[float],
        reward_names: Sequence[str],
        *,
        images: bool,
    ) -> None:
        """Add the completions of all processes, and the `advantages` of all, to the table; collective."""
        generated, table, count = batch.generated, self.table, len(batch.rows)
        assert generated is not None
        assert batch.rewards is not None
        shown = without_secrets([list(prompts), [described(one) for one in generated.completions], batch.logged])
        for column, values in zip(("prompt", "completion"), shown, strict=False):
            table[column].extend(gather_object(values))
        for name, values in zip(reward_names, batch.rewards.T.tolist(), strict=True):
            table["rewards"][name].extend(values)
        table["advantages"].extend(advantages)
        for column in sorted(set(gather_object(list(shown[2])))):  # in the same order on all processes
            table["extra"][column].extend(gather_object(shown[2].get(column, [None] * count)))
        if images:  # some processes and some generations may have none
            seen = gather_object(generated.images or [None] * count)
            if any(seen) or table["images"]:
                gap = len(table["prompt"]) - len(table["images"]) - len(seen)
                table["images"].extend([*[None] * gap, *seen])


def length_figures(lengths: Float[Tensor, " rows"], cut: Float[Tensor, " rows"]) -> dict[str, float]:
    """Return TRL's figures of the lengths of completions, and of those that were not `cut`."""
    ended = lengths[cut == 0] if (cut == 0).any() else lengths.new_zeros(1)
    figures = {"completions/clipped_ratio": cut.mean().item()}
    for kind, values in (("", lengths), ("terminated_", ended)):
        for figure in ("mean", "min", "max"):
            figures[f"completions/{figure}_{kind}length"] = getattr(values, figure)().item()
    return figures
