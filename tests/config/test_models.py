"""Tokens of an adapter that gradient checkpointing would drop are refused before the first step."""

import pytest
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig

from grpo_ext.errors import ConfigError
from support import tiny
from support.trainers import build

PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (PREFIX, "gradient_checkpointing=True: PREFIX_TUNING hands its tokens to the model as a cache"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), ""),
        (LoraConfig(r=2), ""),
    ],
)
def test_checkpointing_is_refused_where_it_cannot_be(adapter, words, tmp_path):
    if words:
        with pytest.raises(ConfigError, match=words):
            build(tiny.model(), tmp_path, peft_config=adapter, gradient_checkpointing=True)
    trainer = build(tiny.model(), tmp_path, peft_config=adapter, gradient_checkpointing=not words, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/mismatch"] < 1e-5
