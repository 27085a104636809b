"""The quickstart's game: its teacher and its agent play by the environment's rules, and its recipes train."""

import asyncio
import random
import re
from types import SimpleNamespace

import pytest

from grpo_ext.data.config import GAME, DataConfig, dataset_problems
from grpo_ext.data.loading import load_datasets
from grpo_ext.environments.library.guess import Guess
from grpo_ext.quickstart import agent, game
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


class Client:
    """Answers with the words of a game, as the package openai does, and keeps what it was asked."""

    def __init__(self, words):
        self.words, self.asked = list(words), []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, model, messages):
        self.asked.append(list(messages))
        message = SimpleNamespace(content=self.words.pop(0))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


@pytest.mark.parametrize(
    ("words", "hints", "reward"),
    [
        (["7"], [], 1.0),
        (["3", "no 9", "7"], ["higher", "lower"], 1.0),
        ([None, "1", "8", "8", "8"], ["no number", "higher", "lower", "lower"], 0.0),
    ],
)
def test_the_agent_plays_as_the_environment_does(words, hints, reward):
    client, environment = Client(words), Guess(high=game.HIGH, guesses=game.GUESSES)
    assert asyncio.run(agent.play(game.game_row(7), client)) == reward
    assert client.words == []
    assert [message["content"] for message in client.asked[-1][2::2]] == hints
    environment.reset(game.game_row(7))
    steps = [environment.step({"role": "assistant", "content": word or ""}) for word in words]
    assert [step.observation for step in steps[:-1]] == hints
    assert (steps[-1].reward, steps[-1].done) == (reward, True)


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
@pytest.mark.parametrize("recipe", [GAME, "quickstart/agent"])
def test_the_recipe_trains_and_evaluates(recipe, tmp_path):
    warm = ensure_model(0, tmp_path, steps=60, lesson=LESSONS[GAME])
    options = {"model_name_or_path": warm, "output_dir": tmp_path / "run", "max_steps": 4, "eval_steps": 4}
    trainer = train(
        load_recipe(["--config", recipe, *(str(word) for key in options for word in (f"--{key}", options[key]))])
    )
    log = trainer.state.log_history
    evaluated = {e["step"]: e["eval_rewards/environment/mean"] for e in log if "eval_rewards/environment/mean" in e}
    assert list(evaluated) == [0, 4]
    assert all(0 < share < 1 for share in evaluated.values())
    turns = [e[key] for e in log for key in e if re.fullmatch(r"eval_environments/\w+/turns", key)]
    assert len(turns) == 2
    assert all(2 < played <= game.GUESSES for played in turns)
