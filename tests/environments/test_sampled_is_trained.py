"""Random conversations, a policy that says anything, tokenizers and a template made to break: what was said trains.

`TRAJECTORIES=10000 python -m pytest tests/environments/test_sampled_is_trained.py` plays as many.
"""

import os

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.episode import EpisodeLimits, Task
from grpo_ext.environments.hosts import EnvironmentHost
from grpo_ext.environments.loop import EpisodeLoop
from grpo_ext.environments.protocol import Conversation, Step
from grpo_ext.environments.rendering import Renderer
from grpo_ext.objective.trajectory import Sample, batch

TRAJECTORIES = int(os.environ.get("TRAJECTORIES", "200"))
PIECES = ["a ", " b", "<|end|>", "<think>", "no</think>", "\n", "é", "\ud800", "<|assistant|>", ";", ";\n", "  ", "7"]
TEMPLATE = (  # thinking is stripped from what was said before, spaces from everything
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] | trim }}{{ end }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def merging() -> PreTrainedTokenizerFast:
    """Its pairs merge over every border, that of a turn too, whose end is a letter."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    texts = [f"<|user|>{a}{b};\n<|assistant|><think>{b}</think>{a};\n<|tool|>" for a in "ab7 é" for b in "a\n ;<"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=None, clean_up_tokenization_spaces=False)


def prefixing() -> PreTrainedTokenizerFast:
    """It begins each text with a space of its own; roles are special tokens."""
    core = Tokenizer(models.BPE(unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    texts = [f"{a}{b}\n{b} {a}" for a in "ab7 é" for b in "a\n ;<"]
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=80, special_tokens=["?"], show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token="?")
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>", "<think>"]})
    made.add_tokens(["</think>"])
    return made


class Babble(Conversation):
    in_process = True

    def reset(self, row):
        self.random = np.random.default_rng(row["place"])

    def said(self):
        return "".join(self.random.choice(PIECES, self.random.integers(1, 6)))

    def step(self, message):
        roles = self.random.choice(["user", "tool"], self.random.integers(1, 3))
        news = self.said() if self.random.random() < 0.5 else [{"role": str(r), "content": self.said()} for r in roles]
        return Step(news, float(self.random.random()), self.random.random() < 0.2, self.random.random() < 0.1)


class Exact(Renderer):
    """Sees that the ids are those of the text, whatever was put together."""

    def following(self, *given):
        context, message = super().following(*given)
        if isinstance(self.tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):  # others lose spaces
            assert self.tokenizer.decode(context.ids) == context.text
        return context, message


class Babbler:
    version, pending, descriptor, waits = 0, 0, None, True

    def __init__(self, ids, end):
        self.ids, self.end, self.random, self.seen, self.said = ids, end, np.random.default_rng(0), {}, {}

    def anyone(self, here, leaves):
        return here

    def generate(self, asked):
        samples = []
        for one in asked:
            ids = [*self.random.choice(self.ids, self.random.integers(0, 8)).tolist(), self.end][: one.limit]
            self.seen.setdefault(one.episode, []).append(one.context)
            self.said.setdefault(one.episode, []).append(ids)
            samples.append((one, Sample(ids, [-0.5] * len(ids))))
        return samples


@pytest.mark.parametrize(("make", "closing"), [(merging, ";"), (prefixing, "<|end|>")])
def test_trained_ids_are_sampled_ids(make, closing):
    tokenizer = make()
    tokenizer.chat_template = TEMPLATE.replace("{{ end }}", closing)
    end = tokenizer.convert_tokens_to_ids(closing)
    engine = Babbler(range(len(tokenizer)), end)
    spec = EnvironmentSpec("babble", Babble, max_turns=6)
    todo = [Task(spec, {"place": i}, [{"role": "user", "content": "go"}], None, i) for i in range(TRAJECTORIES // 2)]
    limits = EpisodeLimits(completion=300, counts_all=True, context=None, ends=frozenset([end]))

    def parsed(ids, context, tools):
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}

    episodes = EpisodeLoop(engine, EnvironmentHost(), Exact(tokenizer, {}), parsed, limits)
    done = [trajectory for trajectory, _ in episodes.run(todo)]
    rows = batch(done, [end])
    for number, (made, ids, mask) in enumerate(zip(done, rows.completion_ids, rows.tool_mask, strict=True)):
        assert made.failure is None
        assert [turn.sampled for turn in made.turns] == engine.said[number]
        assert [turn.context for turn in made.turns] == engine.seen[number]
        said = [token for turn in made.turns for token in turn.sampled]
        assert [token for token, trained in zip(ids, mask, strict=True) if trained] == said
        assert all(
            way(made.tree, k) == turn.context + turn.sampled for k, turn in enumerate(made.turns) if turn.sampled
        )
    contexts = [len(made.rows()) for made in done]
    assert {1, 2, 3} <= set(contexts)


def way(tree, turn):
    """What a turn's last token and all before it are in the tree."""
    place, found = max(i for i, author in enumerate(tree.turns) if author == turn), []
    while place >= 0:
        found.append(tree.ids[place])
        place = tree.parents[place]
    return tree.prompt[: len(tree.prompt) + 1 + place] + found[::-1]
