"""`grpo-ext losses`: the values of `loss_type`."""

import argparse

from grpo_ext.commands.console import by_entry
from grpo_ext.objective.losses import losses


def run(_: argparse.Namespace) -> int:
    """Print names, formula and paper of each loss."""
    for names, row in by_entry(losses):
        print(f"{', '.join(names)}\n    {row.formula}\n    {row.paper}")
    return 0
