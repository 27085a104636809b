"""`grpo-ext try`: ask a trained model, and the model that it was before, as training asked it."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import TextStreamer
from transformers.utils.logging import disable_progress_bar

from grpo_ext.commands.runs import GREEDY, Trained, find
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.policy import load_policy, load_tokenizer_of


class Speaker:
    """A model that answers one question at a time, each in a conversation of its own, as in training."""

    def __init__(self, model: str, asked_as: Trained, tokenizer: Any, **sampling: Any) -> None:
        """Load it; prompt and sampling are those of `asked_as`."""
        dtype = asked_as.record.get("dtype") or "auto"
        self.model = load_policy(model, tokenizer, dtype=dtype, **asked_as.loading).to(asked_as.device)
        self.asked_as, self.tokenizer = asked_as, tokenizer
        own = self.model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
        self.sampling = {"eos_token_id": sorted(ends), **asked_as.sampling(), **sampling}

    def answer(self, question: str, streamer: Any = None) -> str:
        """What it says."""
        inputs = self.asked_as.encode(question, self.tokenizer).to(self.model.device)
        inputs.pop("token_type_ids", None)
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        with torch.no_grad():
            ids = self.model.generate(**inputs, **self.sampling, pad_token_id=pad, streamer=streamer)
        return self.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def questions(prompt: str | None) -> Iterator[str]:
    """The one that was given, else the lines that are piped in, else what is typed until the end of input."""
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


def run(argv: Sequence[str]) -> int:
    """Answer; 2 where there is no such model."""
    options = _parser().parse_args(argv)
    disable_progress_bar()
    try:
        _talk(options)
    except (ConfigError, OSError) as error:  # transformers says by an OSError that the hub has no such model
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo-ext try", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "run", metavar="RUN", help="an output_dir, a checkpoint, a model's or adapter's folder, a hub id"
    )
    parser.add_argument("--compare", action="store_true", help="the model before training beside it")
    parser.add_argument("--prompt", metavar="TEXT", help="one question, and no terminal; or pipe one in on each line")
    parser.add_argument(
        "--greedy", action="store_true", help="the likeliest tokens, in place of the recipe's sampling"
    )
    parser.add_argument("--max_new_tokens", type=int, metavar="N", help="in place of the recipe's limit")
    parser.add_argument("--seed", type=int, metavar="N", help="the same answers every time")
    return parser


def _talk(options: argparse.Namespace) -> None:
    trained = find(options.run)
    sampling = GREEDY.copy() if options.greedy else {}
    if options.max_new_tokens is not None:
        sampling["max_new_tokens"] = options.max_new_tokens
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
            _side_by_side(answers, {"before": trained.before, "after": trained.model})
        elif not typed:
            print(answers["after"], flush=True)


def _introduce(trained: Trained, speaker: Speaker) -> None:
    system = trained.record.get("system_prompt")
    print(f"{trained.model}, asked as in training." if trained.record else f"{trained.model}, as it comes.")
    print(f"System prompt: {system}" if system else "No system prompt.")
    print(", ".join(f"{name} {value}" for name, value in speaker.sampling.items() if value is not None))
    print("Each question begins anew. Ctrl-D ends.")


def _side_by_side(answers: dict[str, str], models: dict[str, str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(*(escape(f"{name}: {models[name]}") for name in answers), expand=True, show_lines=True)
    table.add_row(*map(Text, answers.values()))
    Console().print(table)
