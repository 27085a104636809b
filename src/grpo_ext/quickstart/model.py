"""The quickstart's model: a character tokenizer, a tiny Llama, and a short supervised warm-up, cached on disk."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .task import demonstration, example, problems

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ARCHITECTURE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
}
WARM_UP_STEPS = 220
WARM_UP_BATCH_SIZE = 16
WARM_UP_LEARNING_RATE = 2e-3


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Character tokenizer: printable ASCII and newline; each tag is one ordinary token, so decoding keeps it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *TAGS, "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
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
    """A Llama of about 0.45 million parameters with random weights drawn from `seed`."""
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


def warm_up(directory: str | os.PathLike[str], seed: int = 0, *, steps: int = WARM_UP_STEPS) -> Path:
    """Fit a fresh model to `steps` batches of demonstrations, enough for the format but not for the sums, and save it.

    TRL's SFTTrainer, loss on the completion only, training problems only (no validation or held-out problem).
    """
    from datasets import Dataset
    from trl import SFTTrainer

    directory = Path(directory)
    tokenizer = build_tokenizer()
    rows = [
        {"prompt": example(a, b)["prompt"], "completion": [{"role": "assistant", "content": demonstration(a, b)}]}
        for a, b in problems("train")
    ]
    trainer = SFTTrainer(
        model=build_model(tokenizer, seed),
        args=_warm_up_arguments(directory, seed, steps),
        train_dataset=Dataset.from_list(rows).shuffle(seed).select(range(min(len(rows), steps * WARM_UP_BATCH_SIZE))),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.model.generation_config.max_length = None
    trainer.save_model(str(directory))
    return directory


def _warm_up_arguments(directory: Path, seed: int, steps: int) -> Any:
    """SFT settings; everything that prints, saves or reports is off."""
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=WARM_UP_BATCH_SIZE,
        learning_rate=WARM_UP_LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        adam_beta2=0.99,
        completion_only_loss=True,
        max_length=None,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        seed=seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
