"""Episodes that credit by turn and GRPO need for a task of five turns with one decision: `make bench-credit`.

The prompt names one of four doors; in the third of five turns the model writes a digit, and only this one counts: the
door's digit is rewarded with 1 at once. In the other turns it writes four digits, which are noise. The model knows
digits but not the doors. A run ends when 90 % of the episodes of ten steps in a row have opened their door, or after
180 steps. Writes results/turn_credit.json, turn_credit.md and turn_credit.png.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import json
import logging
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from transformers import TrainerCallback

from grpo_ext import Conversation, GRPOExtConfig, GRPOExtTrainer, Step
from grpo_ext.quickstart.model import Lesson, ensure_model

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "turn_credit.json"
TURNS, DECISIVE, DOORS, GROUP, STEPS = 5, 3, 4, 16, 180
EPISODES = DOORS * GROUP
"""Of a step."""
DIGITS = random.Random(0).sample("0123456789", DOORS)
WINDOW, GOAL, LEARNING_RATE = 10, 0.9, 3e-4
REWARD = "rewards/environment/mean"
ESTIMATORS = {
    "group": {"advantage_estimator": "group"},
    "turn_return": {"advantage_estimator": "turn_return", "advantage_kwargs": {"gamma": 0.0}},
}
TITLES = {"group": "GRPO (`group`)", "turn_return": "`turn_return`, gamma 0"}


class Doors(Conversation):
    """An environment of five turns; the third decides the reward."""

    in_process = True

    def reset(self, row):
        self.digit, self.turn = row["solution"], 0

    def step(self, message):
        self.turn += 1
        paid = float(message["content"] == self.digit) if self.turn == DECISIVE else None
        return Step(str(self.turn), paid, self.turn == TURNS)


class StopAtGoal(TrainerCallback):
    """Ends a run that has learned its task."""

    def on_log(self, args, state, control, **kwargs):
        control.should_training_stop |= reached(curve_of(state.log_history)) is not None


def door(number):
    return [{"role": "user", "content": f"door {number}"}]


def chatter(seed, size):
    """Return random digits: one in the turn that decides, four in the others."""
    draw = random.Random(seed)
    rows = []
    for _ in range(size):
        completion = []
        for turn in range(1, TURNS + 1):
            digits = "".join(draw.choices("0123456789", k=1 if turn == DECISIVE else 4))
            completion += [{"role": "assistant", "content": digits}, {"role": "user", "content": str(turn)}]
        rows.append({"prompt": door(draw.randrange(DOORS)), "completion": completion[:-1]})
    return rows


LESSON = Lesson("doors", [], chatter, steps=150)


def curve_of(log):
    return [entry[REWARD] for entry in log if REWARD in entry]


def reached(curve):
    """Steps until the goal, or None."""
    return next((s for s in range(WINDOW, len(curve) + 1) if statistics.mean(curve[s - WINDOW : s]) >= GOAL), None)


def run(name, seed):
    """The share of episodes of each step that opened their door, and episodes until the goal."""
    folder = str(ensure_model(seed, lesson=LESSON))
    rows = Dataset.from_list([{"prompt": door(i), "solution": DIGITS[i]} for i in range(DOORS)])
    with tempfile.TemporaryDirectory() as output, open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        args = GRPOExtConfig(
            output_dir=output,
            max_steps=STEPS,
            per_device_train_batch_size=EPISODES,
            num_generations=GROUP,
            max_completion_length=64,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            **ESTIMATORS[name],
        )
        trainer = GRPOExtTrainer(folder, None, args, rows, environments=[Doors], callbacks=[StopAtGoal()])
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
    curve = curve_of(trainer.state.log_history)
    steps = reached(curve)
    found = {"estimator": name, "seed": seed, "episodes": steps and steps * EPISODES}
    print(found, f"last {curve[-1]:.2f}, {seconds:.0f} s", flush=True)
    return {**found, "cpu_seconds": round(seconds, 1), "curve": curve}


def shown(result):
    return f"{result['episodes']}" if result["episodes"] else f"not in {STEPS * EPISODES} ({result['curve'][-1]:.0%})"


def table(results):
    """Markdown: a row for each estimator."""
    lines = [
        "# One turn of five decides",
        "",
        f"Episodes until {GOAL:.0%} of those of {WINDOW} steps in a row succeed, for each seed; of a run that does",
        "not get there, the share at its end. `make bench-credit` rewrites this file.",
        "",
        "| advantages | episodes |",
        "|---|---|",
    ]
    for name in ESTIMATORS:
        lines.append(f"| {TITLES[name]} | {', '.join(shown(r) for r in results if r['estimator'] == name)} |")
    return "\n".join([*lines, "", "![share of episodes that succeed](turn_credit.png)", ""])


def picture(results):
    """Success over episodes, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4))
    for r in results:
        smooth = [statistics.mean(r["curve"][max(0, i - WINDOW) : i]) for i in range(1, len(r["curve"]) + 1)]
        label = TITLES[r["estimator"]].replace("`", "") if r["seed"] == results[0]["seed"] else None
        colour = f"C{list(ESTIMATORS).index(r['estimator'])}"
        axis.plot([EPISODES * i for i in range(1, len(smooth) + 1)], smooth, color=colour, label=label)
    axis.axhline(GOAL, color="grey", linewidth=0.8, linestyle="--")
    axis.set(xlabel="episodes", ylabel=f"share that succeed, of {WINDOW} steps", ylim=(0, 1.03))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(FOLDER / "turn_credit.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    results = []
    for seed in args.seeds:
        results += [run(name, seed) for name in ESTIMATORS]
    RESULT.write_text(json.dumps(results) + "\n")
    (FOLDER / "turn_credit.md").write_text(table(results))
    picture(results)
    print(table(results))


if __name__ == "__main__":
    main()
