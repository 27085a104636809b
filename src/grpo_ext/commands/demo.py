"""`grpo-ext demo`: from nothing to a tiny language model that visibly learned by GRPO, and a report, in minutes."""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_ext.evaluation.intervals import mean_of_shares
from grpo_ext.evaluation.results import FOLDER, Result
from grpo_ext.quickstart.evaluate import greedy_accuracy
from grpo_ext.quickstart.model import ensure_model
from grpo_ext.quickstart.report import Run, write_report
from grpo_ext.quickstart.task import load
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.report.page import write_report as write_html
from grpo_ext.train import build_trainer

RECIPE = "quickstart/grpo"


class Stopwatch(dict[str, float]):
    """Seconds per phase, in the order in which the phases ran."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time the block takes to `name`."""
        start = time.monotonic()
        yield
        self[name] = self.get(name, 0.0) + time.monotonic() - start


def demonstrate(
    output_dir: Path,
    *,
    seed: int = 0,
    recipe: str = RECIPE,
    overrides: Sequence[str] = (),
    problems: int = 400,
) -> tuple[Run, Path]:
    """Warm up, measure, train, measure again, report; returns what was measured and the path of report.md."""
    watch, held_out = Stopwatch(), load(eval_size=problems)[1]
    print("1/5  A tiny language model that imitates a careless teacher (trained once, then cached) ...")
    with watch.phase("warm-up"):
        warm = ensure_model(seed)
    options = {"model_name_or_path": warm, "output_dir": output_dir, "seed": seed, "disable_tqdm": True}
    options |= {"log_completions": True, "num_completions_to_print": 0}  # for the report, not for the terminal
    arguments = ["--config", recipe, *(str(word) for key, value in options.items() for word in (f"--{key}", value))]
    trainer = build_trainer(load_recipe([*arguments, *overrides]))
    with watch.phase("evaluation"):
        before = _measure("2/5", "before", trainer, held_out)
    print("3/5  GRPO: eight attempts per problem, a reward for the format and the right answer, nothing else ...")
    with watch.phase("GRPO"):
        trainer.train()
    with watch.phase("evaluation"):
        after = _measure("4/5", "after", trainer, held_out)
    model = output_dir / "model"
    trainer.save_model(str(model))
    measured = Run(before, after, trainer.state.log_history, trainer.objective.describe(), watch, str(model))
    for step, found in ((0, before), (trainer.state.global_step, after)):
        shares = {"accuracy": [s.correct for s in found.samples], "formatted": [s.formatted for s in found.samples]}
        figures = {name: mean_of_shares(values) for name, values in shares.items()}
        result = Result("held_out", str(warm), step, {"temperature": 0}, figures)
        result.write(output_dir / FOLDER / "held_out" / f"step_{step}.json")
    write_html([output_dir], output_dir / "report.html")
    return measured, write_report(output_dir, measured)


def _measure(step: str, when: str, trainer: Any, held_out: Any) -> Any:
    """Held-out accuracy, printed."""
    result = greedy_accuracy(trainer.model, trainer.processing_class, held_out)
    print(f"{step}  Accuracy on {len(result.samples)} held-out problems {when} GRPO: {result.accuracy:.1%}")
    return result


def _quiet() -> None:
    """Silence the libraries' progress bars and notes: the demo's own lines tell the story."""
    import warnings

    import datasets
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def run(argv: Sequence[str]) -> int:
    """Run the demo; unknown options override the recipe, for example `--loss_type dr_grpo`."""
    parser = argparse.ArgumentParser(prog="grpo-ext demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"), help="where the report goes")
    parser.add_argument("--seed", type=int, default=0, help="of the warm-up and of GRPO")
    parser.add_argument("--recipe", default=RECIPE, help="recipe name or path (default: %(default)s)")
    options, overrides = parser.parse_known_args(argv)
    _quiet()
    measured, page = demonstrate(options.output_dir, seed=options.seed, recipe=options.recipe, overrides=overrides)
    total = sum(measured.seconds.values())
    print(f"5/5  {measured.before.accuracy:.1%} -> {measured.after.accuracy:.1%} in {total:.0f} s. Report: {page}")
    print(f"     Open {page.with_suffix('.html')}: curves, completions, all settings.")
    return 0
