"""`grpo-ext demo`: a tiny language model learns by GRPO on this machine, in minutes, with a report."""

import argparse
import dataclasses

from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.quickstart.model import ensure_model
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.report.answer import sentence
from grpo_ext.report.page import write_report
from grpo_ext.report.reading import read_runs
from grpo_ext.train import train


def run(options: argparse.Namespace) -> int:
    """Warm up a model, evaluate, train and evaluate it, and write report.html; keys override the recipe."""
    _silence_libraries()
    print("1/3  A tiny language model imitates a careless teacher ...", flush=True)
    settings = {
        "model_name_or_path": ensure_model(options.seed),
        "output_dir": options.output_dir,
        "seed": options.seed,
        "disable_tqdm": True,
        "log_completions": True,
        "num_completions_to_print": 0,  # for the report, not for the terminal
        "resume_from_checkpoint": "never",
    }
    keys = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    recipe = load_recipe(["--config", options.recipe, *keys, *options.keys])
    held_out = EvalSet("held_out", rewards=recipe.rewards, samples=1, temperature=0.0)
    print("2/3  GRPO: several attempts per problem, rewards for the format and the right answer only ...", flush=True)
    train(dataclasses.replace(recipe, eval_sets=[held_out]))
    page = write_report([options.output_dir], options.output_dir / "report.html")
    print(f"3/3  Did it learn? {sentence(read_runs([options.output_dir])[0])}")
    print(f"     Open {page}: curves, completions, all settings.")
    return 0


def _silence_libraries() -> None:
    """Turn off progress bars and notes of the libraries."""
    import warnings

    import datasets
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
