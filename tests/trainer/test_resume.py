"""A run that is stopped after any step and goes on elsewhere ends at the same bits and has logged the same figures."""

import pytest

from support import tiny, trainers
from support.interrupted import CASES, check, trainer

QUICK = {"both": (3, 8), "lora": (3,), "dynamic sampling": (5,), "stream": (3,)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", QUICK)
def test_resuming_after_two_steps_gives_the_same_bits(case, tmp_path):
    """Step 3 is inside of a generation, 5 in the second epoch, 8 the end of both, where the case has such."""
    check(case, tmp_path, QUICK[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.cases(7)
def test_resuming_after_other_steps_gives_the_same_bits(case, tmp_path):
    check(case, tmp_path, (1, 4) if case in QUICK else (3, 4, 6))


def test_a_reference_that_is_not_in_shards_is_written_once(tmp_path):
    one = trainer(tmp_path, **CASES["sync_ref_model"], save_steps=8)
    one.train()
    assert [path.name for path in (tmp_path / "checkpoint-8").glob("reference*")] == ["reference.pt"]


@pytest.mark.slow
def test_another_split_continues_with_the_same_prompts(tmp_path, caplog):
    """Half the rows in twice the micro-batches: the open generation is sampled anew, the data goes on where it was."""
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": 8}
    seen: dict[str, list] = {}
    for name, split in {"whole": {}, "resumed": {"per_device_train_batch_size": 4}}.items():
        if split:
            split |= {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
        one = trainer(tmp_path / name, **settings | split)
        rewarded, prompts = one._calculate_rewards, seen.setdefault(name, [])

        def note(inputs, *args, rewarded=rewarded, prompts=prompts):
            prompts.append(sorted(row["prompt"] for row in inputs))
            return rewarded(inputs, *args)

        one._calculate_rewards = note
        one.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3") if split else None)
        assert one.state.global_step == 8
    assert "are new ones from here on" in caplog.text
    assert seen["resumed"] == seen["whole"][1:]


def test_a_tied_weight_is_stored_once_and_is_not_missing(tmp_path, caplog, monkeypatch):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    path = tiny.save(tmp_path / "model", tie_word_embeddings=True)
    one = trainers.build(path, tmp_path / "out", **settings)
    one.train()
    monkeypatch.setattr(type(one.model), "from_pretrained", None)  # which nothing needs
    one.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert "missing keys" not in caplog.text
