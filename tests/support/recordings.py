"""Recorded batches as a run leaves them, without a run."""

import torch

from grpo_ext.trainer.recording import FOLDER, FORMAT, file_of, packed, write

PROMPT = 3


def record(folder, step, ids, words=(), *, row, pieces=None):
    """Completions with rewards (1, 0), an advantage of 0.5, ratios 1, 2, 3, ..., and the last token not trained on."""
    pieces = dict(
        pieces or {str(i): word for a, b in zip(ids, words, strict=True) for i, word in zip(a, b, strict=True)}
    )
    width = max(map(len, ids))
    completion = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    lengths = mask.sum(dim=1, keepdim=True)
    places = torch.arange(width).expand(mask.shape)
    batch = {
        "prompt_ids": torch.full((len(ids), 2), PROMPT),
        "prompt_mask": torch.tensor([[0, 1]] * len(ids)),
        "completion_ids": completion,
        "completion_mask": mask,
        "tool_mask": (places < lengths - 1).long() if width > 1 else mask,
        "advantages": torch.full((len(ids),), 0.5),
        "old_per_token_logps": torch.zeros(mask.shape),
        "per_token_logps": (1.0 + places).log(),
        "per_token_loss": torch.zeros(mask.shape),
        "entropies": places / 10,
        "loss": torch.tensor(0.0),
        "group_rewards": torch.tensor([[[1.0, 0.0]] * 2] * len(ids)),
        "generation_row": torch.arange(row, row + len(ids)),
    }
    content = {
        "format": FORMAT,
        "step": step,
        "rank": 0,
        "processes": 1,
        "settings": {},
        "objective": {},
        "reward_names": ["accuracy", "format"],
        "reward_weights": [1.0, 0.5],
        "micro_batches": [packed(batch)],
        "tokens": {str(PROMPT): "Q: ", "0": "<pad>"} | pieces,
    }
    write(file_of(folder / FOLDER, step, 0), content)
