"""Launches that make one row the work of several processes are refused before anything is loaded."""

import pytest
from accelerate.parallelism_config import ParallelismConfig
from peft import get_peft_model

from grpo_ext import GRPOExtConfig
from grpo_ext.config.engines import ENGINE_RULES, check_started
from grpo_ext.errors import ConfigError
from support import tiny, tuners

LAUNCHES = {
    "tp_size=2: tensor parallelism": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
    },
    "cp_size=2: context parallelism": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_CP_SIZE": "2",
    },
    "sp_size=4: sequence parallelism": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_SIZE": "4",
    },
    "FSDP 1": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
}
ALLOWED = (
    {},
    {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
)


def config(**settings):
    return GRPOExtConfig("unused", use_cpu=True, bf16=False, report_to="none", **settings)


@pytest.mark.parametrize("words", LAUNCHES)
def test_a_launch_that_splits_rows_is_refused(words, monkeypatch):
    for name, value in LAUNCHES[words].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as refused:
        config()
    assert "--accelerate_config fsdp2" in str(refused.value)


@pytest.mark.parametrize("launch", ALLOWED)
def test_data_parallelism_is_allowed(launch, monkeypatch):
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    launched = config()
    assert [problem for rule in ENGINE_RULES for problem in rule(launched)] == []


def test_parallelism_in_the_config_is_refused():
    with pytest.raises(ConfigError, match="cp_size=2"):
        config(parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(ConfigError, match="tp_plan"):
        config(model_init_kwargs={"tp_plan": "auto"})


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")  # PEFT
def test_an_adapter_that_the_engine_cannot_split_or_save_is_refused():
    """Without it the first checkpoint failed; a tied copy was refused as one that TRL could not score."""
    whole = tuners.TUNERS["lora whole head"]()
    for name in ("prompt", "p-tuning", "prefix", "cartridge"):
        adapted = get_peft_model(tiny.model(), tuners.TUNERS[name]())
        with pytest.raises(ConfigError, match=r"peft_type='\w+': PEFT saves what it computes from the whole"):
            check_started("FSDP", reference=False, model=adapted)
        check_started("MULTI_CPU", reference=False, model=adapted)
    with pytest.raises(ConfigError, match=r"modules_to_save=\['lm_head'\]: embedding and head are one weight"):
        check_started("FSDP", reference=False, model=get_peft_model(tiny.model(tie_word_embeddings=True), whole))
    check_started("FSDP", reference=False, model=get_peft_model(tiny.model(), whole))
    tied = tiny.model(tie_word_embeddings=True)
    check_started("FSDP", reference=False, model=get_peft_model(tied, tuners.TUNERS["lora"]()))
    check_started("FSDP", reference=False, model=tied)


def test_a_reference_that_only_one_process_has_loaded_is_refused(monkeypatch):
    """Without it the gradient was 8 times its own size off (make bench-splits, KL by FSDP2)."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    check_started("FSDP", reference=False)
    with pytest.raises(ConfigError, match="fsdp_cpu_ram_efficient_loading=True"):
        check_started("FSDP", reference=True)
    with pytest.raises(ConfigError, match="accelerate has started MULTI_CPU"):
        check_started("MULTI_CPU", reference=False)
