"""Which game a prompt is dealt: its own in an evaluation, a new one in each generation, by nothing but identity."""

import dataclasses

import pytest

from grpo_ext import GRPOExtConfig
from grpo_ext.commands.sample import SAMPLING_ONLY, sample
from grpo_ext.rollout.seeds import AttemptId, Purpose, Source, derived, numbered
from support import tiny
from support.dealt import dealing, rows

# Seeds.


def test_seeds_of_different_attempts_differ_and_those_of_one_are_equal():
    attempts = {
        AttemptId(seed, source, prompt, attempt)
        for seed in (0, 1, 2**32 - 1)
        for source in Source
        for prompt in range(40)
        for attempt in range(4)
    }
    prompts = {attempt[:3] for attempt in attempts}
    assert len({attempt.game for attempt in attempts}) == len(prompts)
    assert len({attempt.stream().integers(2**63) for attempt in attempts}) == len(attempts)
    assert all(attempt.game == AttemptId(*attempt).game for attempt in attempts)
    assert len({derived(purpose, 0, 0, 0) for purpose in Purpose}) == len(Purpose)


def test_rows_are_numbered_over_processes():
    whole = numbered(3, Source.TRAINING, range(12), 4)
    assert [(attempt.prompt, attempt.attempt) for attempt in whole] == [(i // 4, i % 4) for i in range(12)]
    assert whole == [*numbered(3, Source.TRAINING, range(6), 4), *numbered(3, Source.TRAINING, range(6, 12), 4)]


# Evaluation by `eval_strategy`.


@pytest.mark.parametrize("defaults", ["paper", pytest.param("trl", marks=pytest.mark.slow)])
def test_each_prompt_of_an_evaluation_has_its_own_game_whatever_the_batches(defaults, tmp_path):
    found = []
    for size in (4, 8):
        trainer = dealing(tmp_path, evaluated=7, per_device_eval_batch_size=size, loss_defaults=defaults)
        for step in (0, 3):
            trainer.state.global_step, trainer.dealt = step, []
            trainer.evaluate()
            found.append(trainer.games_of_prompts())
        trainer.close_rewards()
    assert all(games == found[0] for games in found)
    assert len(found[0]) == 7
    assert len(set.union(*found[0].values())) == 7
    assert all(len(games) == 1 for games in found[0].values())


def test_prompts_of_the_same_text_have_games_of_their_own(tmp_path):
    trainer = dealing(tmp_path, evaluated=6)
    trainer.evaluate(rows(1) * 6)
    assert len(trainer.games_of_prompts()["play 0"]) == 6
    trainer.close_rewards()


def test_training_with_evaluations_between_plays_the_same_games(tmp_path):
    """Evaluations share no games with training, and move none of its games."""
    alone, between = dealing(tmp_path / "a"), dealing(tmp_path / "b", 5, eval_strategy="steps", eval_steps=1)
    for trainer in (alone, between):
        trainer.train()
    assert alone.games("train") == between.games("train")
    trained, evaluated = ({seed for games in between.games(mode) for seed in games} for mode in ("train", "eval"))
    assert len(evaluated) == 5
    assert not trained & evaluated


# Training.


def distinct(generations):
    """Numbers of distinct games of each generation, and of them all."""
    return [len({*games}) for games in generations], len({game for games in generations for game in games})


def test_each_generation_of_a_step_plays_games_of_its_own(tmp_path):
    trainer = dealing(
        tmp_path, loss_defaults="trl", gradient_accumulation_steps=4, steps_per_generation=1, num_iterations=1
    )
    trainer.train()
    assert len(trainer.games("train")) == 8  # four generations in each of two steps
    assert distinct(trainer.games("train")) == ([2] * 8, 16)


def test_a_generation_that_is_used_for_several_steps_plays_its_games_once(tmp_path):
    trainer = dealing(tmp_path, num_iterations=2, steps_per_generation=2, max_steps=8)
    trainer.train()
    assert distinct(trainer.games("train")) == ([4, 4], 8)


def test_fresh_prompts_of_dynamic_sampling_are_dealt_fresh_games(tmp_path):
    """No group ever has a signal: each of four generations plays its two games and two new ones in each round."""
    trainer = dealing(tmp_path, dynamic_sampling="environment", dynamic_sampling_max_rounds=3, max_steps=4)
    trainer.train()
    assert distinct(trainer.games("train")) == ([2] * 16, 32)


# `grpo-ext sample`.


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "kl_estimator": "k3"},
        {"eval_strategy": "epoch"},
        EVALUATED | {"eval_on_start": True},  # as quickstart/guess has
        EVALUATED | {"save_strategy": "best", "metric_for_best_model": "eval_reward"},
        EVALUATED | {"lr_scheduler_type": "reduce_lr_on_plateau"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 1},
        {"log_completions": True, "log_completions_hub_repo": "me/completions"},
    ],
    ids=str,
)
def test_sampling_sets_aside_what_only_training_needs(settings, tmp_path):
    """What is left must be a sound configuration."""
    config = GRPOExtConfig(output_dir=str(tmp_path), **tiny.TRAINING | settings)
    aside = dataclasses.replace(config, **SAMPLING_ONLY)
    assert (aside.beta, aside.kl_estimator, aside.do_eval) == (0.0, None, False)


def test_samples_of_all_prompts_play_games_of_their_own(tmp_path):
    trainer = dealing(tmp_path, trained=6, num_generations_eval=2, **tiny.TRAINING | {"max_steps": 1})
    trainer.model.eval()
    assert len(list(sample(trainer, 2, 2))) == 6
    assert distinct(trainer.games("eval")) == ([2, 2, 2], 6)
    trainer.close_rewards()
