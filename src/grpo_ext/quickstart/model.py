"""The quickstart's models: a character tokenizer, a tiny Llama, and a short supervised warm-up, cached on disk."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_ext.quickstart import game, task
from grpo_ext.quickstart.cache import building, cached

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,  # the least that vLLM knows on a CPU
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}
WARM_UP_BATCH_SIZE = 16
WARM_UP_LEARNING_RATE = 2e-3


class Lesson(NamedTuple):
    """The warm-up of a tiny model.

    Args:
        task: its name.
        words: words that are one token each, besides the characters.
        demonstrations: function of a seed and a number that returns rows of prompt and completion.
        steps: number of training steps.
    """

    task: str
    words: Sequence[str]
    demonstrations: Callable[[int, int], list[dict[str, Any]]]
    steps: int


ADDITION_MODEL = "quickstart"
"""Name of the model that adds."""
LESSONS = {
    ADDITION_MODEL: Lesson("addition", ANSWER_TAGS, task.demonstrations, steps=500),
    "quickstart/guess": Lesson("guess", game.WORDS, game.game_demonstrations, steps=400),
}
"""By name of the model."""


def ensure_model(
    seed: int = 0,
    directory: str | os.PathLike[str] | None = None,
    *,
    steps: int | None = None,
    lesson: Lesson = LESSONS[ADDITION_MODEL],
) -> Path:
    """Return the folder of the warm model of a lesson and seed, trained on first use.

    It is kept in `directory`, or in a cache.

    The folder's name is a hash of everything that the weights depend on: code, settings and library versions. Two
    processes at once train in separate folders, and the first to finish renames its folder.
    """
    name = f"{lesson.task}-{_fingerprint(seed, steps or lesson.steps)}"
    target = Path(directory, name) if directory is not None else cached(name)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    logger.warning(
        "Training the quickstart's model for %s, once: %d steps on the CPU, about a minute. Then it is kept in %s.",
        *(lesson.task, steps or lesson.steps, target),
    )
    with building(target.parent) as folder:
        warm_up(folder / "model", seed, steps=steps, lesson=lesson)
        try:
            os.rename(folder / "model", target)
        except OSError:
            if not target.is_dir():  # another process did not win: a real failure
                raise
    return target


def ensure_once(name: str = ADDITION_MODEL) -> Path:
    """Return `ensure_model` of a name in `LESSONS`; the main process trains it while the others wait."""
    from accelerate import PartialState

    with PartialState().main_process_first():
        return ensure_model(lesson=LESSONS[name])


def _fingerprint(seed: int, steps: int) -> str:
    """Return a hash of everything that the weights depend on."""
    code = [Path(str(file)).read_text(encoding="utf-8") for file in (__file__, task.__file__, game.__file__)]
    libraries = {name: version(name) for name in ("torch", "transformers", "trl", "tokenizers")}
    settings = json.dumps([code, libraries, seed, steps], sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def build_tokenizer(words: Sequence[str] = ANSWER_TAGS) -> "PreTrainedTokenizerFast":
    """Return a tokenizer of printable ASCII and newline; each of `words` is one ordinary token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = dict.fromkeys([*SPECIAL, *words, "\n", *map(chr, range(32, 127))])
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=ARCHITECTURE["max_position_embeddings"],
    )


def build_model(tokenizer: "PreTrainedTokenizerFast", seed: int = 0) -> "PreTrainedModel":
    """Return a Llama of 0.57 million parameters with random weights drawn from `seed`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **ARCHITECTURE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def warm_up(
    directory: str | os.PathLike[str],
    seed: int = 0,
    *,
    steps: int | None = None,
    lesson: Lesson = LESSONS[ADDITION_MODEL],
) -> Path:
    """Train a new model for `steps` supervised steps on a teacher's demonstrations, and save it.

    The model learns the format of an answer and the teacher's mistakes. A plain loop on the CPU: a trainer would join
    the process group of the launch, but only one of several processes trains this model.
    """
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    steps = steps or lesson.steps
    tokenizer = build_tokenizer(lesson.words)
    model = build_model(tokenizer, seed)
    rows = [_encoded(row, tokenizer) for row in lesson.demonstrations(seed, steps * WARM_UP_BATCH_SIZE)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).split(WARM_UP_BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = LambdaLR(optimizer, partial(_warm_up_rate, steps=steps))
    model.train()
    for chosen in order:
        model(**_batch([rows[i] for i in chosen], tokenizer.pad_token_id)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Path(directory)


def _encoded(row: dict[str, Any], tokenizer: "PreTrainedTokenizerFast") -> tuple[list[int], int]:
    """Return the token ids of a demonstration, and the length of its prompt."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    return tokenizer(whole)["input_ids"], len(tokenizer(prompt)["input_ids"])


def _batch(rows: Sequence[tuple[list[int], int]], pad: int) -> dict[str, Any]:
    """Return a model's arguments for rows of ids and prompt lengths, padded on the right; prompts have no labels."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row, _ in rows])
    is_prompt = torch.arange(longest) < torch.tensor([[prompt] for _, prompt in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(is_prompt | (mask == 0), -100)}


def _warm_up_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear for ten steps, then half a cosine down."""
    if step < 10:
        return step / 10
    return 0.5 * (1 + math.cos(math.pi * (step - 10) / max(1, steps - 10)))
