"""Training with environments, by TRL's trainer and ours: tiny models, real environments, real steps."""

import math

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from grpo_ext import Conversation, GRPOExtConfig, GRPOExtTrainer, Step
from grpo_ext.errors import ConfigError
from support import painters, speakers, tiny, worlds
from support.trainers import weights

HERE = worlds.__file__
GUESS = {"name": "guess", "kwargs": {"high": 9, "guesses": 3}, "max_turns": 4}
LENGTH = {"max_completion_length": 40}


def asked(n=16):
    return [{"prompt": [{"role": "user", "content": f"guess {i}:"}], "solution": str(i % 9 + 1)} for i in range(n)]


class Recorder(GRPOExtTrainer):
    def _generate_and_score_completions(self, inputs):
        self.output = super()._generate_and_score_completions(inputs)
        return self.output

    def _calculate_rewards(self, inputs, *completed):
        self.episodes = [row.get("trajectory") for row in inputs]
        return super()._calculate_rewards(inputs, *completed)


def trained(tmp_path, environments, data=None, kind=Recorder, model=None, rewards=None, **settings):
    args = GRPOExtConfig(output_dir=str(tmp_path), **(tiny.TRAINING | LENGTH | settings))
    made = kind(
        model or tiny.model(),
        rewards,
        args,
        data or asked(),
        processing_class=tiny.tokenizer(),
        environments=environments,
    )
    made.train()
    return made


def turns(completions, trajectory, **_):
    assert [len(t.turns) for t in trajectory] == [sum(m["role"] == "assistant" for m in c) for c in completions]
    return [float(len(t.turns)) for t in trajectory]


def played(folder):
    return trained(folder, [GUESS | {"weight": 0.5}], rewards=[turns])


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return played(tmp_path_factory.mktemp("played"))


def test_a_model_that_plays_is_trained_on_what_it_said(trainer):
    output, episodes = trainer.output, trainer.episodes
    for row, episode in enumerate(episodes):
        active = (output["completion_mask"] * output["tool_mask"])[row].bool()
        assert output["completion_ids"][row][active].tolist() == [i for t in episode.turns for i in t.sampled]
        assert episode.turns[0].version == 1
    log = trainer.state.log_history[0]
    assert 1 <= log["environments/guess/turns"] == pytest.approx(log["rewards/turns/mean"])
    assert log["environments/guess/failed"] == 0
    assert log["rewards/environment/mean"] == pytest.approx(log["environments/guess/reward"], abs=1e-6)


class Deals(Conversation):
    """Brings its own prompt."""

    def reset(self, row):
        return [{"role": "user", "content": f"{self.seed % 9}:"}]

    def step(self, message):
        return Step(done=True)


def test_the_table_has_the_prompt_that_the_policy_read(tmp_path):
    trainer = trained(tmp_path, [Deals], max_steps=1, log_completions=True, num_completions_to_print=0)
    assert {len(prompt) for prompt in trainer._logs["prompt"]} == {1}
    assert all(prompt[0]["content"][1:] == ":" for prompt in trainer._logs["prompt"])


def test_a_run_is_a_function_of_its_recipe_and_seed(trainer, tmp_path):
    assert torch.equal(weights(trainer.model), weights(played(tmp_path).model))
    assert not torch.equal(weights(trainer.model), weights(tiny.model()))


def test_a_failing_environment_of_two_costs_its_own_episodes(tmp_path):
    faults = [None, "raises in reset", None, "exits"]  # every other row is of the environment that has them
    data = [
        {**row, "environment": ("guess", "Faulty")[i % 2], "fault": faults[i % 4]} for i, row in enumerate(asked())
    ]
    trainer = trained(tmp_path, [GUESS, {"path": f"{HERE}:Faulty"}], data, max_steps=4)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {a.environment for a in trainer.episodes} <= {"guess", "Faulty"}
    assert sum(entry.get("environments/Faulty/failed", 0) for entry in log) > 0
    assert not any(entry.get("environments/guess/failed", 0) for entry in log)
    lost = torch.tensor([a.failure is not None for a in trainer.episodes])
    assert (trainer.output["advantages"][lost] == 0).all()
    assert not trainer.episode_runner.hosts._servers
    table = trainer._logs["extra"]
    assert {"guess", "Faulty"} == set(table["environment_name"])
    assert all(
        (failure is None) or name == "Faulty"
        for failure, name in zip(table["failure"], table["environment_name"], strict=True)
    )
    assert [len(rewards) for rewards in list(table["turn_rewards"])[-8:]] == [len(a.turns) for a in trainer.episodes]


class Unscored(worlds.Counter):
    def get_reward(self):
        return None


@pytest.mark.parametrize(("rewards", "unscored"), [(None, [True]), ([tiny.spread], [False, True])])
def test_an_environment_without_a_reward_for_an_episode_prints_no_row(rewards, unscored, tmp_path, caplog):
    made = speakers.tokenizer()
    ours = type("Ours", (speakers.Ours,), {"script": [lambda i: "a" * i + "<|im_end|>"]})(
        speakers.model(made),
        rewards,
        GRPOExtConfig(str(tmp_path), **(tiny.TRAINING | {"max_steps": 1, "max_completion_length": 40})),
        speakers.rows(),
        processing_class=made,
        environments=[Unscored],
    )
    ours.train()
    assert "returned None" not in caplog.text
    columns = [list(ours._logs["rewards"][name]) for name in ours.reward_func_names]
    assert [all(map(math.isnan, column)) for column in columns] == unscored


def test_groups_without_a_signal_are_drawn_anew_with_environments_too(tmp_path):
    trainer = trained(tmp_path, [GUESS], dynamic_sampling="environment", dynamic_sampling_max_rounds=2)
    assert trainer.state.log_history[0]["dynamic_sampling/rounds"] >= 1


def test_trls_class_makes_the_rows_that_it_makes_in_trl(tmp_path):
    made = speakers.tokenizer()
    script = [lambda i: speakers.called("add", number=i + 1), lambda i: "done<|im_end|>" if i % 2 else "<|im_end|>"]
    settings = tiny.TRAINING | {"max_completion_length": 400, "max_steps": 1}
    common = {"train_dataset": speakers.rows(start=list(range(8))), "processing_class": made}
    stock = type("Stock", (speakers.Stock,), {"script": script})(
        speakers.model(made), [], GRPOConfig(str(tmp_path), **settings), environment_factory=worlds.Counter, **common
    )
    ours = type("Ours", (speakers.Ours,), {"script": script})(
        speakers.model(made),
        None,
        GRPOExtConfig(str(tmp_path), environment_waves="turn", **settings),  # the script counts the rows of a wave
        environments=[worlds.Counter],
        **common,
    )
    by_trls_loop = type("Ours", (speakers.Ours,), {"script": script})(
        speakers.model(made),
        [],
        GRPOExtConfig(str(tmp_path), **settings),
        environment_factory=worlds.Counter,
        **common,
    )
    inputs = [dict(common["train_dataset"][i // 4]) for i in range(8)]
    outputs = [trainer._generate_and_score_completions(inputs) for trainer in (stock, ours, by_trls_loop)]
    for name in ("prompt_ids", "completion_ids", "completion_mask", "tool_mask"):
        assert torch.equal(outputs[0][name], outputs[1][name]), name
        assert torch.equal(outputs[0][name], outputs[2][name]), name
    assert stock._logs["rewards"]["Counter"] == ours._logs["rewards"]["environment"]
    assert stock._logs["rewards"]["Counter"] == by_trls_loop._logs["rewards"]["Counter"]
    ours.close_rewards()


@pytest.mark.parametrize("data", [Dataset.from_dict({"environment": ["counter", "solved"] * 4}), None])
def test_trls_environments_may_make_the_prompts(data, tmp_path):
    """Rows without a prompt, or no rows: the prompt is what `reset` returns, as in stock TRL."""
    script = [
        lambda i: speakers.called("add" if i < 4 or data is None else "look", number=i + 1),
        lambda i: "<|im_end|>",
    ]
    settings = tiny.TRAINING | {"max_completion_length": 400, "shuffle_dataset": False}
    factory = worlds.Counter if data is None else {"counter": worlds.Counter, "solved": worlds.Solved}
    made, outputs = speakers.tokenizer(), []
    for kind, config in ((speakers.Stock, GRPOConfig), (speakers.Ours, GRPOExtConfig)):
        trainer = type("Scripted", (kind,), {"script": script})(
            speakers.model(made),
            [tiny.spread],
            config(str(tmp_path), **settings),
            data,
            processing_class=made,
            environment_factory=factory,
        )
        inputs = [dict(trainer.train_dataset[i // 4]) | {"solution": "1"} for i in range(8)]
        outputs.append(trainer._generate_and_score_completions(inputs))
    for name in ("prompt_ids", "completion_ids", "tool_mask"):
        assert torch.equal(outputs[0][name], outputs[1][name]), name
    assert " from 0" in made.decode(outputs[1]["prompt_ids"][0])


@pytest.mark.parametrize("name", ["rollout_func", "environment_factory", "tools"])
def test_what_makes_rollouts_beside_them_is_refused(name, tmp_path):
    given = {name: [tiny.count_a] if name == "tools" else worlds.Counter}
    with pytest.raises(ConfigError, match=f"{name} with environments=.*both would make the rollouts"):
        GRPOExtTrainer(
            tiny.model(), None, GRPOExtConfig(str(tmp_path), **tiny.TRAINING), asked(), environments=[GUESS], **given
        )


@pytest.mark.parametrize("setting", [{"environment_waves": "turn"}, {"completion_length_counts": "policy"}])
def test_settings_of_environments_without_any_are_refused(setting, tmp_path):
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}=.*there are none"):
        trained(tmp_path, None, tiny.prompts(16), rewards=[tiny.count_a], **setting)


def test_what_does_not_suit_is_told_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError) as error:
        trained(tmp_path, [GUESS | {"max_turns": 0}, {"path": "support.worlds:Solved"}], [{"prompt": "text"}] * 16)
    assert len(error.value.problems) == 4
    seen = {"seen": [row | {"images": [painters.painted("red")]} for row in asked()]}
    args, words = GRPOExtConfig(str(tmp_path), **tiny.TRAINING), tiny.tokenizer()
    with pytest.raises(ConfigError, match="so the model would not see the images"):
        GRPOExtTrainer(tiny.model(), None, args, asked(), seen, environments=[GUESS], processing_class=words)
