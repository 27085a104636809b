"""A loss of your own: SPO's quadratic penalty instead of a clip (Xie et al., arXiv:2401.16025).

Run it:              python examples/custom_loss.py [--max_steps 50]
Use it in a recipe:  loss_type: examples.custom_loss:spo       (any module that can be imported from where you start)
                     loss_kwargs: {width: 0.3}
"""

import sys

from torch import Tensor

from grpo_ext import register_loss
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train


@register_loss(
    "spo",
    paper="SPO, arXiv:2401.16025",
    formula="-(1/B) sum_i (1/n_i) sum_t (r A - |A| (r - 1)^2 / (2 width))",
    aggregation="seq-mean-token-mean",  # what is left out is as in `grpo_ext.objective.losses.Loss`
)
def spo(log_ratio: Tensor, advantages: Tensor, *, width: float = 0.2) -> Tensor:
    """-(r A - |A| (r - 1)^2 / (2 width)), with its maximum where clipping would start; its gradient never vanishes."""
    ratio = log_ratio.exp()
    return -(ratio * advantages - advantages.abs() * (ratio - 1).square() / (2 * width))


if __name__ == "__main__":
    own = ["--loss_type", "custom_loss:spo"]
    run = ["--max_steps", "5", "--save_strategy", "no", "--output_dir", "outputs/custom_loss"]
    train(load_recipe(["--config", "quickstart/grpo", *own, *run, *sys.argv[1:]]))
