"""`grpo-ext train`: train a recipe, in this process or by `accelerate launch`."""

import argparse
from collections.abc import Sequence

from grpo_ext.commands.launching import launch, wanted_launch
from grpo_ext.trainer.signals import signals


def run(options: argparse.Namespace) -> int:
    """Train by accelerate if the command line or the recipe asks for a launch, else in this process."""
    if options.help_all:
        from grpo_ext.recipe.help import print_help

        print_help()
        return 0
    wanted = wanted_launch(options)
    if wanted is not None:
        return launch(wanted, options.keys)
    _train_here(options.keys)
    return 0


def _train_here(keys: Sequence[str]) -> None:
    watching = signals.watch()  # before imports that take seconds
    try:
        from grpo_ext.train import main as train_main

        train_main(keys)
    finally:
        if watching:
            signals.stop_watching()
