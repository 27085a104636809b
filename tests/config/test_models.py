"""What transformers and PEFT fail of in the first step is refused before it, with a cure that works."""

import pytest
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import CTRLConfig, CTRLLMHeadModel, ModernBertDecoderConfig, ModernBertDecoderForCausalLM

from grpo_ext.commands.cli import main
from grpo_ext.errors import ConfigError
from support import tiny
from support.trainers import build

TOKENS = {"vocab_size": len(tiny.WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


def ctrl() -> CTRLLMHeadModel:
    return CTRLLMHeadModel(CTRLConfig(**TOKENS, n_positions=64, n_embd=32, dff=64, n_layer=1, n_head=4))


def modern_bert() -> ModernBertDecoderForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**TOKENS, **sizes, cls_token_id=1, sep_token_id=1))


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize(
    ("make", "adapter", "words"),
    [
        (ctrl, None, "gradient_checkpointing=True: CTRLLMHeadModel does not support it. Set gradient_checkpointing"),
        (tiny.model, PREFIX, "gradient_checkpointing=True: PREFIX_TUNING hands its tokens to the model as a cache"),
        (tiny.model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), ""),
        (tiny.model, LoraConfig(r=2), ""),
    ],
)
def test_checkpointing_is_refused_where_it_cannot_be(make, adapter, words, tmp_path):
    if words:
        with pytest.raises(ConfigError, match=words):
            build(make(), tmp_path, peft_config=adapter, gradient_checkpointing=True)
    trainer = build(make(), tmp_path, peft_config=adapter, gradient_checkpointing=not words, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/mismatch"] < 1e-5


def test_a_token_that_the_models_config_requires_is_missed_before_the_first_step(tmp_path, capsys):
    model, folder = modern_bert(), tmp_path / "model"
    assert tiny.tokenizer().bos_token is None
    with pytest.raises(ConfigError, match="the tokenizer has no bos_token, and ModernBertDecoderConfig requires one"):
        build(model, tmp_path)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    recipe = ["check", "--config", "quickstart/grpo", "--model_name_or_path", str(folder), "--dataset_name"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "solution": "b"}\n' * 32)
    with pytest.raises(SystemExit):
        main([*recipe, str(tmp_path / "rows.jsonl")])
    printed = capsys.readouterr()
    assert "has no bos_token" in " ".join((printed.out + printed.err).split())
