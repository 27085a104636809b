"""Greedy accuracy on a set of problems."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_ext.quickstart.task import ANSWER, FORMAT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Sample(NamedTuple):
    """One problem and what the model wrote for it."""

    question: str
    completion: str
    solution: str

    @property
    def formatted(self) -> bool:
        """Whether the completion is exactly <think> ... </think> <answer> ... </answer>."""
        return FORMAT.fullmatch(self.completion) is not None

    @property
    def correct(self) -> bool:
        """Whether the text in <answer> is the solution, character by character."""
        found = ANSWER.search(self.completion)
        return found is not None and found[1].strip() == self.solution


class Evaluation(NamedTuple):
    """Share of right answers, every sample, and share of well-formed completions."""

    accuracy: float
    samples: list[Sample]
    format_rate: float


def greedy_accuracy(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    problems: Iterable[Mapping[str, Any]],
    batch_size: int = 128,
    *,
    max_new_tokens: int = 64,
) -> Evaluation:
    """Complete each problem (a row with `prompt` and `solution`) greedily and count the right answers."""
    rows = list(problems)
    if not rows:
        raise ValueError("problems is empty: greedy_accuracy needs at least one problem.")
    was_training = model.training
    model.eval()
    try:
        texts = [
            text
            for i in range(0, len(rows), batch_size)
            for text in _complete(model, tokenizer, rows[i : i + batch_size], max_new_tokens)
        ]
    finally:
        model.train(was_training)
    samples = [Sample(r["prompt"][-1]["content"], t, r["solution"]) for r, t in zip(rows, texts, strict=True)]
    correct, formatted = (sum(s.correct for s in samples), sum(s.formatted for s in samples))
    return Evaluation(correct / len(samples), samples, formatted / len(samples))


def _complete(model: Any, tokenizer: Any, rows: list[Mapping[str, Any]], max_new_tokens: int) -> Iterator[str]:
    """Greedy completions of a batch of prompts, special tokens dropped."""
    import torch

    batch = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows],
        add_generation_prompt=True,
        padding=True,
        padding_side="left",
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
    yield from tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
