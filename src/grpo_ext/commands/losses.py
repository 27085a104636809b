"""`grpo-ext losses`: what `loss_type` may name."""

from grpo_ext.commands.console import by_entry
from grpo_ext.objective.losses import losses


def run(argv: list[str]) -> int:
    """Names, formula and paper of each."""
    for names, row in by_entry(losses):
        print(f"{', '.join(names)}\n    {row.formula}\n    {row.paper}")
    return 0
