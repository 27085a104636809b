"""Two steps with dynamic sampling, run by accelerate: `dynamic_rank.py MODEL OUTPUT`; each rank saves what it saw."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from grpo_ext.train import leave_process_group
from support.trainers import number, record


def one_in_three(prompts, completions, **_):
    """Two of three prompts have no signal; the others score by what the completion says."""
    return [
        sum(map(ord, c)) % 31 / 31 if number(p) % 3 == 1 else 0.5 for p, c in zip(prompts, completions, strict=True)
    ]


def main(model: str, output: str) -> None:
    trainer = record(
        model,
        Path(output) / "run",
        [one_in_three],
        rows=96,
        loss_type="grpo",
        dynamic_sampling="one_in_three",
        dynamic_sampling_max_rounds=12,
        per_device_train_batch_size=12,
        num_generations=8,
    )
    trainer.train()
    rows = []
    for batch in trainer.outputs:
        prompts, completions = (
            trainer.processing_class.batch_decode(batch[name], skip_special_tokens=True)
            for name in ("prompt_ids", "completion_ids")
        )
        scores = one_in_three(prompts, completions)
        rows.append(list(zip(prompts, completions, scores, batch["advantages"].tolist(), strict=True)))
    names = [name for name in trainer.state.log_history[0] if name.startswith("dynamic_sampling")]
    saved = {
        "rows": rows,
        "drawn": trainer._sampler.prompts.drawn,
        "metrics": [[entry[name] for name in names] for entry in trainer.state.log_history if names[0] in entry],
        "weights": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]),
    }
    torch.save(saved, Path(output) / f"rank{trainer.accelerator.process_index}.pt")
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
