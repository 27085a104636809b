"""Reward models on real tiny models: every score against the same chat alone, unpadded, pooled by hand."""

import logging
import os
import pickle
import sys
import threading

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.composition import parse_rewards
from grpo_ext.rewards.models import loaded_model
from grpo_ext.rewards.models.reward_model import RewardModelScorer, scorer_from
from support import tiny

reward_model, minimind, minimind_current = rewards["reward_model"], rewards["minimind"], rewards["minimind_current"]

VOCAB, PAD, EOS = len(tiny.WORDS), 0, 1
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CHATS = [
    [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    for prompt, answer in [("a", "b"), ("what is 1 + 1?", "2"), ("x" * 40, "y" * 30), ("", "z"), ("q", "a b c")]
    + [("n" * i, "m" * (9 - i)) for i in range(1, 9)]
]


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch):
    monkeypatch.setattr(loaded_model, "_models", {})


def llama(kind=LlamaForSequenceClassification, config=LlamaConfig, sizes=SIZES, **overrides):
    shared = {"vocab_size": VOCAB, "num_labels": 1, "max_position_embeddings": 128, "pad_token_id": PAD}
    return kind(config(**(shared | sizes | {"initializer_range": 0.5} | overrides)))


def gpt2(**overrides):  # absolute positions: a left-padded row is wrong without its own
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    return llama(GPT2ForSequenceClassification, GPT2Config, sizes, **overrides)


def bert(**overrides):  # sees its padding, unless masked
    return llama(BertForSequenceClassification, BertConfig, **overrides)


def save(folder, build=llama, side="right", **overrides):
    torch.manual_seed(1)
    build(**overrides).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side = side
    tokenizer.save_pretrained(folder)
    return str(folder)


def ids_of(chat):
    text = "".join(m["content"] + ("=" if m["role"] == "user" else "\0") for m in chat)
    return [EOS if c == "\0" else tiny.WORDS.index(c) for c in text]


def alone(folder, chats=CHATS):
    """The scores, one chat at a time and without padding; a Llama's are pooled here, at the last token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = []
    for chat in chats:
        ids = torch.tensor([ids_of(chat)])
        with torch.no_grad():
            if isinstance(model, LlamaForSequenceClassification) and model.config.pad_token_id != EOS:
                scores.append((model.model(ids).last_hidden_state[0, -1] @ model.score.weight[0]).item())
            else:
                scores.append(model(ids).logits.item())
    return scores


@pytest.mark.parametrize(
    ("build", "side", "pad"),
    [
        (llama, "right", PAD),
        (llama, "left", PAD),
        (llama, "right", None),  # pools the very last token, whatever the padding
        (llama, "left", None),
        (llama, "right", EOS),  # pools the token before the end of sequence, as the checkpoint says
        (llama, "left", EOS),
        (gpt2, "right", PAD),
        (gpt2, "left", PAD),
        (bert, "right", PAD),
    ],
)
def test_scores_depend_on_neither_micro_batch_nor_padding(tmp_path, build, side, pad):
    folder = save(tmp_path, build, side, pad_token_id=pad)
    expected = alone(folder)
    assert max(expected) - min(expected) > 0.1
    for micro_batch_size in (1, 3, 8):
        scores = RewardModelScorer(folder, micro_batch_size=micro_batch_size)(CHATS)
        assert scores == pytest.approx(expected, abs=1e-5), micro_batch_size


def test_a_text_prompt_is_a_chat_and_the_policy_has_no_say(tmp_path):
    folder = save(tmp_path)
    reward = reward_model(
        prompts=["a", [{"role": "user", "content": "q"}]], completions=["b", CHATS[4][1:]], model=folder
    )
    assert reward == pytest.approx([alone(folder)[0], alone(folder)[4]], abs=1e-5)
    blocks = [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]
    assert reward_model(prompts=["q"], completions=[[{"content": blocks}]], model=folder) == pytest.approx(reward[1:])


def test_clip_and_blend_by_hand(tmp_path):
    folder = save(tmp_path)
    text = "<think>a</think><answer> zzz </answer>"
    texts = [text.replace("<", "?").replace(">", "."), text, "zzz"]
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": t}] for t in texts]
    plain, full, answer = RewardModelScorer(folder)(chats)
    assert abs(full - answer) > 0.1
    columns = {"prompts": ["a"] * 3, "completions": texts, "model": folder}
    assert reward_model(**columns) == pytest.approx([plain, full, answer])
    assert reward_model(**columns, answer_weight=0.25) == pytest.approx([plain, 0.75 * full + 0.25 * answer, answer])
    c = min(abs(full), abs(answer)) / 2
    signs = [1 if score > 0 else -1 for score in (full, answer)]
    clipped = reward_model(**columns, answer_weight=0.6, score_clip=c)
    assert clipped[1] == pytest.approx(0.4 * signs[0] * c + 0.6 * signs[1] * c)
    bonus = minimind(prompts=["a"] * 3, completions=texts)
    mind = minimind(prompts=["a"] * 3, completions=texts, reward_model={"model": folder}, score_clip=c)
    assert mind == pytest.approx([part + extra for part, extra in zip(clipped, bonus, strict=True)])
    current = minimind_current(
        prompts=["a"], completions=["zzz"], reward_model={"model": folder, "micro_batch_size": 1}
    )
    assert current == pytest.approx([-0.5 + max(-3, min(3, answer))])


# Loading


def spy_on_loading(monkeypatch):
    calls, real = [], AutoModelForSequenceClassification.from_pretrained

    def from_pretrained(*args, **kwargs):
        calls.append({**kwargs, "zero3": is_deepspeed_zero3_enabled()})
        return real(*args, **kwargs)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", from_pretrained)
    return calls


def test_one_load_for_all_threads_and_rewards_with_the_same_settings(tmp_path, monkeypatch):
    folder, calls, results = save(tmp_path), spy_on_loading(monkeypatch), []
    threads = [
        threading.Thread(target=lambda n=n: results.append(RewardModelScorer(folder, micro_batch_size=n)(CHATS)))
        for n in (1, 2, 3, 4)
    ]
    assert calls == []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1
    assert results == [pytest.approx(alone(folder), abs=1e-5)] * 4
    calls.clear()
    RewardModelScorer(folder, dtype="bfloat16", revision="v2")(CHATS[:1])
    [call] = calls
    assert (call["dtype"], call["revision"], call["trust_remote_code"]) == ("bfloat16", "v2", False)
    first, second = (model.model for model in loaded_model._models.values())
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)


def test_evaluation_mode_and_no_gradient_and_the_same_in_another_process(tmp_path):
    folder = save(tmp_path, attention_dropout=0.9)
    scorer = RewardModelScorer(folder, device="cpu")
    assert scorer(CHATS) == scorer(CHATS) == pickle.loads(pickle.dumps(scorer))(CHATS)
    [loaded] = loaded_model._models.values()
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert str(loaded.device) == "cpu"
    assert scorer([]) == []


def test_the_policys_sharding_does_not_reach_the_reward_model(tmp_path, monkeypatch):
    class Zero3:
        def is_zero3(self):
            return True

    folder, calls, config = save(tmp_path), spy_on_loading(monkeypatch), Zero3()
    monkeypatch.setattr("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", None)
    set_hf_deepspeed_config(config)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert is_deepspeed_zero3_enabled()
    scores = RewardModelScorer(folder)(CHATS[:2])
    assert [call["zero3"] for call in calls] == [False]
    assert is_deepspeed_zero3_enabled()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    monkeypatch.setattr("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", None)
    assert scores == pytest.approx(alone(folder, CHATS[:2]), abs=1e-5)


def test_what_is_no_reward_model_is_refused(tmp_path):
    policy = tiny.save(tmp_path / "policy")
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a known reward model"):
        RewardModelScorer(policy)(CHATS)
    with pytest.raises(ValueError, match=r"no weights for score\.weight"):
        RewardModelScorer(policy, "sequence_classification")(CHATS)
    with pytest.raises(ValueError, match=r"LlamaModel has no get_score\(tokenizer, chat\)"):
        RewardModelScorer(policy, "get_score")(CHATS)
    with pytest.raises(ValueError, match="3 labels per chat"):
        RewardModelScorer(save(tmp_path / "labels", num_labels=3))(CHATS)
    bare = save(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        RewardModelScorer(bare)(CHATS)


# What cannot be scored


def test_a_chat_that_is_too_long_or_not_text_is_none_and_said_once(tmp_path, caplog):
    folder = save(tmp_path, max_position_embeddings=40)
    seeing = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "b"}]
    with caplog.at_level(logging.WARNING, "grpo_ext"):
        for _ in range(2):
            scores = RewardModelScorer(folder)([*CHATS, seeing])
    long = [i for i, chat in enumerate(CHATS) if len(ids_of(chat)) > 40]
    assert long == [2]
    assert [i for i, score in enumerate(scores) if score is None] == [2, len(CHATS)]
    kept = [chat for i, chat in enumerate(CHATS) if i not in long]
    assert [s for s in scores if s is not None] == pytest.approx(alone(folder, kept), abs=1e-5)
    assert [record.getMessage() for record in caplog.records].count(
        f"reward model {folder!r}: chats of more than 40 tokens are unscorable (None). See max_length."
    ) == 1
    lengths = [len(ids_of(chat)) for chat in CHATS]
    assert [s is None for s in RewardModelScorer(folder, max_length=11)(CHATS)] == [n > 11 for n in lengths]
    assert 11 in lengths
    with pytest.raises(ValueError, match=r"max_length=41: .* takes at most 40 tokens"):
        RewardModelScorer(folder, max_length=41)(CHATS)


def test_out_of_memory_halves_the_micro_batch_and_loses_nothing(tmp_path, monkeypatch, caplog):
    folder, sizes = save(tmp_path), []
    scorer = RewardModelScorer(folder, micro_batch_size=8)
    scorer(CHATS[:1])
    [loaded] = loaded_model._models.values()
    real, room = loaded.model.forward, [3]

    def forward(input_ids, **rest):
        sizes.append(len(input_ids))
        if len(input_ids) > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(input_ids=input_ids, **rest)

    monkeypatch.setattr(loaded.model, "forward", forward)
    with caplog.at_level(logging.WARNING, "grpo_ext"):
        scores = scorer(CHATS)
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2, 1]
    assert scores == pytest.approx(alone(folder), abs=1e-5)
    assert "micro-batches of 2 now" in caplog.text
    sizes.clear()
    scorer(CHATS[:3])
    assert sizes == [2, 1]
    room[0] = 0
    with pytest.raises(torch.OutOfMemoryError) as error:
        scorer(CHATS)
    assert "one chat of 72 tokens: lower max_length" in error.value.__notes__[0]


# Models with a method of their own

REMOTE_CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel


class LetterConfig(PreTrainedConfig):
    model_type = "letters"


class LetterModel(PreTrainedModel):
    config_class = LetterConfig

    def __init__(self, config):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.tensor([0.5]))
        self.sizes = []
        self.post_init()

    def _init_weights(self, module):
        pass

    def _score(self, tokenizer, chat):
        text = chat[-1]["content"]
        return {"nan": float("nan"), "inf": float("inf")}.get(text, self.weight.item() * len(text))

    def get_score(self, tokenizer, chat):
        assert not torch.is_grad_enabled() and tokenizer.chat_template and chat[0]["role"] == "user"
        self.sizes.append(1)
        return self._score(tokenizer, chat)
"""
SEVERAL = """
    def get_scores(self, tokenizer, chats):
        self.sizes.append(len(chats))
        return torch.tensor([self._score(tokenizer, chat) for chat in chats]).squeeze().tolist()
"""


def save_with_code(folder, monkeypatch, several):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "letter_model.py").write_text(REMOTE_CODE + (SEVERAL if several else ""))
    (folder / "config.json").write_text(
        '{"model_type": "letters", "architectures": ["LetterModel"], "auto_map": '
        '{"AutoConfig": "letter_model.LetterConfig", "AutoModel": "letter_model.LetterModel"}}'
    )
    from safetensors.torch import save_file

    save_file({"weight": torch.tensor([0.25])}, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("several", "sizes"), [(False, [1] * 7), (True, [3, 3, 1])])
def test_get_score_with_code_of_its_own_only_where_it_is_trusted(tmp_path, monkeypatch, several, sizes):
    folder = save_with_code(tmp_path, monkeypatch, several)
    for kind in ("auto", "get_score"):
        with pytest.raises(ValueError, match=r"has code of its own.*set trust_remote_code: true"):
            RewardModelScorer(folder, kind)(CHATS[:1])
    assert not (tmp_path / "modules").exists() or not list((tmp_path / "modules").rglob("letter_model.py"))
    texts = ["abc", "nan", "z" * 30, "", "inf", "ab", "abcd", "abcde"]
    columns = {"prompts": ["q"] * 8, "completions": texts, "model": folder, "trust_remote_code": True}
    rewards_ = reward_model(**columns, micro_batch_size=3, max_length=30)
    assert rewards_ == [0.75, None, None, 0.0, None, 0.5, 1.0, 1.25]  # 30 z, and what the template adds, are too many
    [loaded] = [m for m in loaded_model._models.values() if m.model is not None]
    assert loaded.model.sizes == sizes
    nan = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "nan"}]
    assert RewardModelScorer(folder, trust_remote_code=True)([nan]) == [None]


# Options


def test_a_recipe_writes_its_options_under_minimind():
    kwargs = {"reward_model": {"model": "org/model", "dtype": "bfloat16", "micro_batch_size": 4}}
    assert parse_rewards([{"name": "minimind", "kwargs": kwargs}])[1] == []
    assert parse_rewards([{"name": "reward_model", "kwargs": kwargs["reward_model"]}])[1] == []
    for options, words in [
        ({"model": "m", "dtyp": "float16"}, "reward_model.dtyp='float16'.* Did you mean 'dtype'"),
        ({"dtype": "float16"}, "it has no model"),
        ({"model": "m", "micro_batch_size": 0}, "micro_batch_size=0"),
    ]:
        with pytest.raises(ValueError, match=words):
            scorer_from(options)
        for name in ("minimind", "minimind_current"):
            assert parse_rewards([{"name": name, "kwargs": {"reward_model": options}}])[1] != []
    with pytest.raises(ValueError, match="two scorers"):
        minimind(prompts=[], completions=[], scorer=len, reward_model={"model": "m"})


def test_models_are_not_copied_into_worker_processes():
    own = {"model": "m"}
    kwargs = {"reward_model": own, "minimind": {"reward_model": own}, "minimind_current": {"reward_model": own}}
    kwargs["remote"] = {"url": "http://h", "protocol": "score"}
    specs, _ = parse_rewards([{"name": name, "kwargs": given} for name, given in kwargs.items()])
    assert [spec.isolated for spec in specs] == [False] * 4
    assert [spec.isolated for spec in parse_rewards(["minimind", "minimind_current"])[0]] == [True] * 2
