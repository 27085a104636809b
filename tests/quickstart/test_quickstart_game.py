"""The quickstart's game: its teacher plays by the environment's rules, and its recipe trains."""

import random

import pytest

from grpo_ext.data.config import COLOURS, GAME, DataConfig, dataset_problems
from grpo_ext.data.loading import load_datasets
from grpo_ext.environments.library.guess import Guess
from grpo_ext.quickstart import game
from grpo_ext.quickstart.model import LESSONS, build_tokenizer, ensure_model
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train

RECIPE = ["--config", GAME]


def played():
    return game.game_demonstrations(0, 400)


def test_the_teacher_plays_by_the_environments_rules():
    [spec] = load_recipe(RECIPE).environments
    assert spec.kwargs == {"high": game.HIGH, "guesses": game.GUESSES}
    found = 0
    for secret in random.Random(1).choices(range(1, game.HIGH + 1), k=400):
        messages = game.clumsy_game(secret, random.Random(secret))
        environment = Guess(**spec.kwargs)
        environment.reset(game.game_row(secret))
        steps = [environment.step(message) for message in messages[::2]]
        assert [step.observation for step in steps[:-1]] == [message["content"] for message in messages[1::2]]
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        found += steps[-1].reward
    assert 0.3 < found / 400 < 0.7


def test_the_longest_game_fits_the_recipe():
    tokenizer = build_tokenizer(LESSONS[GAME].words)
    longest = max(played(), key=lambda row: len(row["completion"]))
    ids = [
        tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        for messages in (longest["prompt"], longest["prompt"] + longest["completion"])
    ]
    assert len(ids[1]) - len(ids[0]) == 5 * game.GUESSES - 2 <= load_recipe(RECIPE).training.max_completion_length
    assert tokenizer.unk_token_id not in ids[1]


def test_a_step_plays_every_number():
    numbers = [str(secret) for secret in range(1, game.HIGH + 1)]
    train_set, eval_set = load_datasets(GAME, DataConfig(), eval_needed=True)
    assert train_set["solution"] == eval_set["solution"] == numbers
    training = load_recipe(RECIPE).training
    assert training.per_device_train_batch_size == training.num_generations * len(numbers)
    assert "not a procedural task" in str(dataset_problems(DataConfig(dataset_kwargs={"size": 5}), GAME)[0])


@pytest.mark.slow
def test_the_recipe_trains_and_evaluates(tmp_path):
    warm = ensure_model(0, tmp_path, steps=60, lesson=LESSONS[GAME])
    options = {"model_name_or_path": warm, "output_dir": tmp_path / "run", "max_steps": 4, "eval_steps": 4}
    trainer = train(load_recipe([*RECIPE, *(str(word) for key in options for word in (f"--{key}", options[key]))]))
    log = trainer.state.log_history
    evaluated = {e["step"]: e["eval_rewards/environment/mean"] for e in log if "eval_rewards/environment/mean" in e}
    assert list(evaluated) == [0, 4]
    assert all(0 < share < 1 for share in evaluated.values())
    turns = [e["eval_environments/guess/turns"] for e in log if "eval_environments/guess/turns" in e]
    assert all(2 < played <= game.GUESSES for played in turns)


@pytest.mark.slow
def test_the_recipe_of_pictures_trains_and_evaluates(tmp_path):
    warm = ensure_model(0, tmp_path, steps=40, lesson=LESSONS[COLOURS])
    options = {"model_name_or_path": warm, "output_dir": tmp_path / "run", "max_steps": 2, "eval_steps": 2}
    words = [str(word) for key in options for word in (f"--{key}", options[key])]
    log = train(load_recipe(["--config", COLOURS, *words])).state.log_history
    evaluated = {e["step"]: e["eval_rewards/accuracy/mean"] for e in log if "eval_rewards/accuracy/mean" in e}
    assert list(evaluated) == [0, 2]
    assert all(0 < share < 1 for share in evaluated.values())
