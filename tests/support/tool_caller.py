"""A tiny model that was taught to call tools in Qwen's turns, and what it may call."""

import functools
import itertools
import json

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from support import speakers, worlds


def add(number: int) -> int:
    """Add to ten.

    Args:
        number: What is added.
    """
    return 10 + number


async def wait() -> str:
    """Wait."""
    return "waited"


CALLS = [("add", {"number": number}) for number in (1, 2, 3)] + [("add", {"number": -1}), ("look", {}), ("wait", {})]
TOOLS = ([add, wait], [worlds.Counter.add, worlds.Counter.look])
ASKED = ("count", "count from 3")
ANSWERS = ("11", "3", "waited", "it is 3", "{'error': 'only upwards'}")


def _spoken(name, given):
    return json.dumps({"name": name, "arguments": given})


def _demonstrations(tokenizer):
    """Conversations of one call and a closing word, each as ids and the places that are taught."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    opening = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for tools, asked, (name, given), answer in itertools.product(TOOLS, ASKED, CALLS, ANSWERS):
        if name not in [tool.__name__ for tool in tools]:
            continue
        call = {"type": "function", "function": {"name": name, "arguments": given}}
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "content": answer},
            {"role": "assistant", "content": "done"},
        ]
        text = tokenizer.apply_chat_template(messages, tools=list(tools), tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        begins = [i + len(opening) for i in range(len(ids)) if ids[i : i + len(opening)] == opening]
        taught = {place for begin in begins for place in range(begin, ids.index(end, begin) + 1)}
        yield ids, [one if place in taught else -100 for place, one in enumerate(ids)]


@functools.cache
def taught() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model that calls a tool in almost every first turn, and its tokenizer; do not train it: copy it."""
    tokenizer = speakers.tokenizer()
    rendered = [tokenizer.apply_chat_template(speakers.ASKED, tools=list(tools), tokenize=False) for tools in TOOLS]
    lines = {line for text in rendered for line in text.split("\n") if len(line) > 12 and "<" not in line[:1]}
    tokenizer.add_tokens(sorted(lines) + [_spoken(*call) for call in CALLS] + ["done", "assistant", "user", "system"])
    model, rows = speakers.model(tokenizer, hidden_size=64, initializer_range=0.1), list(_demonstrations(tokenizer))
    optimizer, order = torch.optim.AdamW(model.parameters(), lr=5e-3), torch.Generator().manual_seed(0)
    for _ in range(60):
        chosen = [rows[i] for i in torch.randint(len(rows), (8,), generator=order)]
        width = max(len(ids) for ids, _ in chosen)
        ids, labels = (
            torch.tensor([row[part] + [filler] * (width - len(row[part])) for row in chosen])
            for part, filler in ((0, tokenizer.pad_token_id), (1, -100))
        )
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer
