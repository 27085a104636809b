"""A tiny model that speaks in Qwen's turns and calls, and trainers whose sampler is scripted."""

from datasets import Dataset
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from grpo_ext import GRPOExtTrainer
from grpo_ext.quickstart.model import build_tokenizer
from grpo_ext.rollout.samplers import Sampled
from support import tiny

ASKED = [{"role": "user", "content": "count"}]


def tokenizer():
    """Characters, and Qwen's tags as one token each."""
    made = build_tokenizer()
    made.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"])
    made.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<user>"]})
    made.chat_template = qwen3_chat_template
    return made


def model(made, **overrides):
    settings = {"vocab_size": len(made), "eos_token_id": made.eos_token_id, "max_position_embeddings": 4096}
    return tiny.model(**{**settings, **overrides})


def rows(n=8, **columns):
    return Dataset.from_dict({"prompt": [ASKED] * n, **columns})


def called(name, **arguments):
    """What a model writes that calls a tool."""
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def _said(trainer, contexts):
    """What `trainer.script[k]` says in turn k of every conversation, by the row's place."""
    made, start = trainer._tokenizer, trainer._tokenizer.convert_tokens_to_ids("<|im_start|>")
    said = []
    for place, ids in enumerate(contexts):
        turn = sum(token == start for token in ids) // 2 - 1  # user, assistant, tool, assistant, ...
        said.append(made(trainer.script[turn](place), add_special_tokens=False)["input_ids"])
    return said


class Speaking:
    """The sampler of a trainer of ours."""

    collective, takes_streams = False, False

    def __init__(self, trainer):
        self.trainer, self.limit = trainer, trainer.max_completion_length

    def sample(self, contexts, limits, streams=None, **options):
        rows = zip(_said(self.trainer, contexts), limits, strict=True)
        return [Sampled(ids[:limit], None, None) for ids, limit in rows]


class Stock(GRPOTrainer):
    script: list

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return _said(self, prompt_ids), None


class Ours(GRPOExtTrainer):
    script: list

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.collector.policy = Speaking(self)
