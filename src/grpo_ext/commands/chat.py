"""`grpo-ext try`: ask a trained model, and the model before training, with the prompts and sampling of training."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.utils.logging import disable_progress_bar

from grpo_ext.commands.runs import GREEDY, Trained, find_trained, loading
from grpo_ext.recipe.loading import load_policy, load_tokenizer_of
from grpo_ext.tables import Table, show


class Speaker:
    """A model that answers one question at a time, each in a new conversation.

    Args:
        model: folder or hub id of the weights.
        trained: the run whose prompts and sampling are used.
        tokenizer: that of the run.
        sampling: options of `generate` that override those of the run.
    """

    def __init__(self, model: str, trained: Trained, tokenizer: PreTrainedTokenizerBase, **sampling: Any) -> None:
        dtype = trained.record.get("dtype") or "auto"
        with loading(model):
            loaded: Any = load_policy(model, tokenizer, dtype=dtype, **trained.loading)
        self.model = loaded.to(trained.device)
        self.trained, self.tokenizer = trained, tokenizer
        own = self.model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
        self.sampling = {"eos_token_id": sorted(ends), **trained.sampling(), **sampling}

    def answer(self, question: str, streamer: TextStreamer | None = None) -> str:
        """Return the completion of a question."""
        inputs = self.trained.encode(question, self.tokenizer).to(self.model.device)
        inputs.pop("token_type_ids", None)
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        with torch.no_grad():
            ids = self.model.generate(**inputs, **self.sampling, pad_token_id=pad, streamer=streamer)
        return str(self.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def questions(prompt: str | None) -> Iterator[str]:
    """Yield the given question, else the lines of a pipe, else what the user types until the end of input."""
    if prompt is not None:
        yield prompt
    elif not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
    else:
        with suppress(ImportError):
            import readline  # noqa: F401  arrows and history for `input`
        with suppress(EOFError, KeyboardInterrupt):
            while True:
                if (question := input("\n> ")).strip():
                    yield question


def run(options: argparse.Namespace) -> int:
    """Answer questions until the input ends."""
    disable_progress_bar()
    trained = find_trained(options.run, trust_remote_code=options.trust_remote_code)
    sampling = GREEDY.copy() if options.greedy else {}
    if options.max_new_tokens is not None:
        sampling["max_new_tokens"] = options.max_new_tokens
    with loading(trained.model):
        tokenizer = load_tokenizer_of(trained.model, **trained.loading)
    speakers = {"after": Speaker(trained.model, trained, tokenizer, **sampling)}
    if options.compare:
        speakers = {"before": Speaker(trained.before, trained, tokenizer, **sampling), **speakers}
    typed = options.prompt is None and sys.stdin.isatty()
    if typed:
        _introduce(trained, speakers["after"])
    for question in questions(options.prompt):
        answers = {}
        for name, speaker in speakers.items():
            if options.seed is not None:
                torch.manual_seed(options.seed)
            streams = typed and not options.compare
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
            answers[name] = speaker.answer(question, streamer)
        if options.compare:
            models = {"before": trained.before, "after": trained.model}
            table = Table(*(f"{name}: {models[name]}" for name in answers), expand=True, show_lines=True)
            table.add_row(*answers.values())
            show(table)
        elif not typed:
            print(answers["after"], flush=True)
    return 0


def _introduce(trained: Trained, speaker: Speaker) -> None:
    system = trained.record.get("system_prompt")
    print(f"{trained.model}{', with the prompts and sampling of training' if trained.record else ''}.")
    print(f"System prompt: {system}" if system else "No system prompt.")
    print(", ".join(f"{name} {value}" for name, value in speaker.sampling.items() if value is not None))
    print("Each question starts a new conversation. Ctrl-D ends.")
