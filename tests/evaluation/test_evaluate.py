"""An evaluation by the engine that trains: what it draws, what it leaves behind, and what it makes of judges."""

import asyncio
import json
import random
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_ext import Conversation, GRPOExtConfig, GRPOExtTrainer, Step, waiting
from grpo_ext.data.eval_sets import EvalSet, parse_eval_sets
from grpo_ext.errors import ConfigError, RewardError, RunInterrupted, SamplerLost
from grpo_ext.evaluation.during import DuringTraining
from grpo_ext.evaluation.evaluate import evaluate, evaluating, prompts_at_a_time
from grpo_ext.evaluation.results import Result, differences, logged_figures, per_prompt, result
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.trainer.signals import signals
from support import interrupted, seeing, tiny, trainers

VOWELS = RewardSpec("vowels", "support.trainers:unit_interval")
ROWS = [{"prompt": f"{'abcdefgh'[i % 8]}{i}:", "solution": str(i), "data_source": "ab"[i % 2]} for i in range(5)]
SET = EvalSet("held_out", rewards=(VOWELS,), samples=4, threshold=0.25, temperature=0.7, seed=3)


@pytest.fixture
def trainer(tmp_path):
    made = []

    def make(**settings):
        made.append(trainers.build(tiny.model(), tmp_path / f"run{len(made)}", **settings))
        return made[-1]

    return make


def drawn(trainer, tmp_path, chosen=SET, rows=ROWS, name="kept", identity=0):
    return evaluate(trainer, chosen, rows, kept=tmp_path / name, identity={"run": identity}, workers=0)


def test_it_samples_each_prompt_as_told(trainer, tmp_path):
    samples = drawn(trainer(), tmp_path, replace(SET, max_completion_length=5))
    assert [s["index"] for s in samples] == [i for i in range(5) for _ in range(4)]
    assert [s["solution"] for s in samples[::4]] == ["0", "1", "2", "3", "4"]
    assert max(s["tokens"] for s in samples) == 5
    assert all(s["truncated"] == (s["tokens"] == 5) for s in samples)
    assert len({s["completion"] for s in samples}) > 10
    expected = trainers.unit_interval([s["completion"] for s in samples])
    assert [s["rewards/vowels"] for s in samples] == expected


def test_all_chunks_sample_equally_many_rows(trainer, tmp_path, monkeypatch):
    """A shorter last chunk is filled up: the processes of a round gather tensors of one shape."""
    one, asked = trainer(), []
    monkeypatch.setattr(one, "_generate", lambda prompts, stock=one._generate: asked.append(prompts) or stock(prompts))
    samples = drawn(one, tmp_path)
    assert [len(prompts) for prompts in asked] == [8, 8, 8]
    assert [sample["index"] for sample in samples] == [i for i in range(5) for _ in range(4)]
    assert asked[-1] == [ROWS[4]["prompt"]] * 8


@pytest.mark.parametrize("prompts", range(1, 40))
@pytest.mark.parametrize("batch", [1, 8, 9, 32])
def test_chunks_are_as_few_as_can_be_and_as_even(prompts, batch):
    args = SimpleNamespace(per_device_eval_batch_size=batch, per_device_train_batch_size=1)
    size, most = prompts_at_a_time(args, 2, prompts), max(1, batch // 2)
    assert 1 <= size <= most
    assert -(-prompts // size) == -(-prompts // most)
    assert size == 1 or -(-prompts // (size - 1)) > -(-prompts // size)  # no narrower chunks are as few


def test_greedy_is_what_generate_finds(trainer, tmp_path):
    one = trainer()
    samples = drawn(one, tmp_path, replace(SET, samples=1, temperature=0.0, max_completion_length=6))
    for sample, row in zip(samples, ROWS, strict=True):
        ids = one.processing_class(row["prompt"], return_tensors="pt")
        found = one.model.generate(**ids, do_sample=False, max_new_tokens=6)[0, ids["input_ids"].shape[1] :]
        assert sample["completion"] == one.processing_class.decode(found, skip_special_tokens=True)


def test_a_seed_says_all(trainer, tmp_path):
    first, again, other = (
        [s["completion"] for s in drawn(trainer(), tmp_path, replace(SET, seed=seed), name=f"{i}")]
        for i, seed in enumerate([3, 3, 4])
    )
    assert first == again
    assert first != other


def test_nothing_is_left_behind(trainer, tmp_path):
    one = trainer()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    config, group = one.generation_config, one.num_generations_eval
    drawn(one, tmp_path)
    assert before[0] == random.getstate()
    assert before[1] == np.random.get_state()[1].tolist()
    assert torch.equal(before[2], torch.get_rng_state())
    assert (one.generation_config, one.num_generations_eval) == (config, group)
    assert one.model.training
    assert not one._metrics["eval"]


def test_it_goes_on_where_it_was_cut_off(trainer, tmp_path, monkeypatch):
    whole = drawn(trainer(per_device_eval_batch_size=8), tmp_path, name="whole")
    lines = (tmp_path / "whole").read_text().splitlines()
    assert len(lines) == 1 + 3  # what it is of, and three chunks of two prompts at most
    (tmp_path / "cut").write_text("\n".join([*lines[:2], lines[2][:40]]))
    one = trainer(per_device_eval_batch_size=8)
    asked = []
    monkeypatch.setattr(one, "_generate", lambda prompts, stock=one._generate: asked.append(prompts) or stock(prompts))
    assert drawn(one, tmp_path, name="cut") == whole
    assert len(asked) == 2
    assert (tmp_path / "cut").read_text() == (tmp_path / "whole").read_text()


@pytest.mark.filterwarnings("ignore")
def test_images_that_are_read_again_are_the_same_rows(tmp_path, monkeypatch):
    """By their pixels, not by their places in memory."""
    words, args = seeing.processor("llava"), GRPOExtConfig(str(tmp_path), **tiny.TRAINING)
    model, asked = seeing.model("llava", dtype=torch.float32), []
    rows = [list(seeing.rows((1, 0, 2, 1))) for _ in range(2)]
    chosen = replace(SET, rewards=(RewardSpec("said", "test_evaluate:messages"),))
    one = GRPOExtTrainer(model, [tiny.spread], args, rows[0], processing_class=words)
    drawn(one, tmp_path, chosen, rows[0])
    lines = (tmp_path / "kept").read_text().splitlines()
    assert "[image 56x56]" in lines[1]
    (tmp_path / "kept").write_text("\n".join(lines[:2]))
    monkeypatch.setattr(one, "_generate", lambda prompts, stock=one._generate: asked.append(prompts) or stock(prompts))
    drawn(one, tmp_path, chosen, rows[1])
    assert len(asked) == 1  # of two chunks
    assert (tmp_path / "kept").read_text().splitlines() == lines
    drawn(one, tmp_path, chosen, [*rows[1][:3], {**rows[1][3], "images": rows[1][0]["images"]}])
    assert len(asked) == 3


def test_another_runs_file_is_begun_anew(trainer, tmp_path):
    drawn(trainer(), tmp_path, identity=1)
    samples = drawn(trainer(), tmp_path, replace(SET, seed=9), identity=2)
    assert [s["completion"] for s in samples] == [
        s["completion"] for s in drawn(trainer(), tmp_path, replace(SET, seed=9), name="fresh", identity=2)
    ]


def test_other_prompts_under_the_same_name_are_sampled_anew(trainer, tmp_path):
    drawn(trainer(), tmp_path)
    rows = [{**row, "solution": "0"} for row in ROWS]
    assert drawn(trainer(), tmp_path, rows=rows) == drawn(trainer(), tmp_path, rows=rows, name="fresh")


def test_chunks_of_another_size_are_begun_anew(trainer, tmp_path):
    drawn(trainer(), tmp_path)
    wider = trainer(per_device_train_batch_size=16)
    assert drawn(wider, tmp_path) == drawn(wider, tmp_path, name="fresh")
    assert (tmp_path / "kept").read_text().count("\n") == 1 + 2  # of three prompts and two


def test_a_reward_that_raises_ends_it_by_name(trainer, tmp_path):
    bad = replace(SET, rewards=(RewardSpec("broken", "test_evaluate:broken", on_error="raise"),))
    with pytest.raises(RewardError, match="broken"):
        drawn(trainer(), tmp_path, bad)


def hangs(completions, **_):
    waiting.shutdown().set()
    time.sleep(60.0)


async def never(completions, **_):
    waiting.shutdown().set()
    await asyncio.sleep(60.0)


@pytest.mark.parametrize("judge", ["hangs", "never"])
def test_a_signal_leaves_a_judge_that_does_not_return(judge, trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "GRACE_SECONDS", 0.1)
    chosen = replace(SET, rewards=(RewardSpec(judge, f"test_evaluate:{judge}"),))
    with waiting.ended_by(waiting.Shutdown()), pytest.raises(SamplerLost, match="evaluation of held_out: not waited"):
        drawn(trainer(), tmp_path, chosen)


class SamplerRecord(Conversation):
    """Pays what is drawn, and fails where that is high."""

    def reset(self, row):
        self.value = random.Random(self.seed).random()
        if self.value > 0.6:
            raise RuntimeError("no world")

    def step(self, message):
        return Step(done=True)

    def get_reward(self):
        return self.value


def messages(completions, **_):
    return [float(len(completion)) for completion in completions]


def turns_of(trajectory, **_):
    return [[1.0 for _ in attempt.turns] for attempt in trajectory]


def test_environments_play_one_game_for_each_prompt(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    args = GRPOExtConfig(output_dir=str(tmp_path), **tiny.TRAINING)
    played = {"processing_class": tiny.tokenizer(), "environments": [{"path": SamplerRecord, "weight": 0.5}]}
    made = [GRPOExtTrainer(tiny.model(), None, args, rows, **played) for _ in range(2)]
    made[1].state.global_step = 7
    rewards = (RewardSpec("said", "test_evaluate:messages"), RewardSpec("by_turn", "test_evaluate:turns_of"))
    chosen = replace(SET, plays=True, judge=("environment",), rewards=rewards)
    found = [drawn(one, tmp_path, chosen, rows, name=f"{i}") for i, one in enumerate(made)]
    paid = [[s["rewards/environment"] for s in samples] for samples in found]
    assert paid[0] == paid[1]
    assert all(len(set(paid[0][i : i + 4])) == 1 for i in range(0, 20, 4))
    assert len(set(paid[0])) > 2
    failed = [value is None for value in paid[0]]
    assert failed == [s["rewards/said"] is None for s in found[0]] == [s["environment/failed"] for s in found[0]]
    assert [s["rewards/by_turn"] for s in found[0]] == [None if lost else 1.0 for lost in failed]
    figures = result(chosen, found[0], model="m").figures
    assert figures["environment/failed"].mean == sum(failed) / 20 > 0
    assert figures["environment/turns"].mean == 1
    assert figures["avg@4"].prompts == 5 - sum(failed) // 4
    assert figures["avg@4"].mean == sum(value > 0.25 for value in paid[0] if value) / (20 - sum(failed))


def broken(completions, **_):
    raise RuntimeError("no")


def test_weights_are_those_of_a_run_without_it(trainer):
    ends = []
    for sets in ([], [(replace(SET, every=1), ROWS), (replace(SET, name="other", samples=1), ROWS)]):
        one = trainer(max_steps=3, learning_rate=0.01)
        if sets:
            one.add_callback(DuringTraining(one, sets, workers=0))
        one.train()
        ends.append((trainers.weights(one.model), [log.get("reward") for log in one.state.log_history]))
    plain, evaluated = ends
    assert torch.equal(plain[0], evaluated[0])
    assert [r for r in plain[1] if r is not None] == [r for r in evaluated[1] if r is not None]
    logged = [log["step"] for log in one.state.log_history if "eval_held_out/avg@4" in log]
    assert logged == [0, 1, 2, 3]
    assert [log["step"] for log in one.state.log_history if "eval_other/avg@1" in log] == [0, 3]


SIGNALLED_AT = {"before the first step": 0, "in the middle": 2, "after the last step": 3}


@pytest.mark.cases(1)
@pytest.mark.parametrize("place", SIGNALLED_AT)
def test_a_signal_leaves_it_between_chunks_and_the_resumed_run_completes_it(place, trainer, tmp_path, monkeypatch):
    step, sets = SIGNALLED_AT[place], [(replace(SET, every=1), ROWS), (replace(SET, name="other", every=2), ROWS)]
    path, chunks = tiny.save(tmp_path / "model"), []

    def run(name, stops=False, **resumed):
        one = trainers.build(path, tmp_path / name, max_steps=3, learning_rate=0.01)

        def sampled(*args, stock=one._generate):
            if not one.model.training:
                chunks.append(one.state.global_step)
                if stops and chunks.count(step) == 1:
                    signals.arrived(signal.SIGTERM)
            return stock(*args)

        monkeypatch.setattr(one, "_generate", sampled)
        one.add_callback(DuringTraining(one, sets, workers=0))
        one.train(**resumed)
        return one

    with pytest.raises(RunInterrupted, match=f"saved checkpoint-{step} of 3" if step else "no step had been made"):
        run("out", stops=True)
    assert chunks.count(step) == 1
    again = run("out", **{"resume_from_checkpoint": str(tmp_path / "out" / f"checkpoint-{step}")} if step else {})
    assert chunks.count(step) == 6  # of two sets with three each
    whole = run("whole")
    assert torch.equal(trainers.weights(again.model), trainers.weights(whole.model))
    assert sorted(interrupted.logged(again)) == sorted(interrupted.logged(whole))


# Figures.


def sample(index, value, read=None, source="a", **further):
    row = {"index": index, "rewards/judge": value, "answer_parsed": read, "data_source": source, "tokens": 3}
    return row | {"truncated": False} | further


JUDGED = EvalSet("set", rewards=(RewardSpec("judge", "accuracy"),), samples=4, k=(1, 2))


def test_figures_by_hand():
    samples = [sample(0, v, r) for v, r in [(1, "7"), (1, "7"), (0, "8"), (None, "[cut off]")]]
    samples += [sample(1, v, r, "b") for v, r in [(0, "1"), (0, "2"), (0, "3"), (1, "4")]]
    samples += [sample(2, None, "5") for _ in range(4)]  # a reference that cannot be read
    found = result(JUDGED, samples, model="m")
    means = {name: mean.mean for name, mean in found.figures.items()}
    assert means["avg@4"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert means["pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    # pairs of 7 7 8 -: 77 1, 78 twice 1/2, 7- twice 1, 8- 0; each of four answers wins half of its three pairs
    assert means["maj@2"] == pytest.approx((4 / 6 + 1 / 4) / 2)
    assert means["answered"] == pytest.approx((3 / 4 + 1) / 2)
    assert found.left_out == 1
    assert found.by_source["b"]["avg@4"].mean == 0.25
    assert logged_figures(found)["eval_set/a/avg@4"] == 0.5
    assert found.figures["rewards/judge"].mean == pytest.approx((2 / 3 + 1 / 4) / 2)


def test_a_lenient_judge_stands_beside_the_strict_one():
    values = [(0, 1), (0, 1), (0, None), (1, 1)]
    samples = [sample(0, strict) | {"rewards/lenient": lenient} for strict, lenient in values]
    samples += [sample(1, 0) | {"rewards/lenient": None} for _ in range(4)]
    rewards = (*JUDGED.rewards, RewardSpec("lenient", "last_number"))
    found = result(replace(JUDGED, judge=("judge", "lenient"), rewards=rewards), samples, model="m")
    assert found.right == {"judge": {"0": 0.25, "1": 0.0}, "lenient": {"0": 0.75}}
    assert found.figures["pass@2"].mean == pytest.approx(1 / 4)
    assert found.figures["lenient/pass@2"].mean == 1.0
    assert found.left_out == 0
    assert differences([found, replace(found, model="n", right={"judge": {"0": 1, "1": 0}, "lenient": {"0": 1}})]) == [
        "n, right by judge: +0.375  (-4.390 to +5.140), prompt by prompt over 2",
        "n, right by lenient: +0.250  (-inf to +inf), prompt by prompt over 1",
    ]


def test_right_answers_vote_together_however_they_are_written():
    samples = [sample(0, v, r) for v, r in [(1, "18"), (1, "18 dollar"), (0, "17"), (0, "17"), (1, "18.00")]]
    found = result(replace(JUDGED, samples=5, k=(5,)), samples, model="m")
    assert found.figures["maj@5"].mean == 1


def test_wrong_answers_vote_together_however_they_are_written():
    """The majority of 18, 18.0, 1/2, 0.5, 1/2 is one half."""
    votes = [(1, "18"), (1, "18.0"), (0, r"\frac{1}{2}"), (0, "0.5"), (0, r"\frac12")]
    found = result(replace(JUDGED, samples=5, k=(5,)), [sample(0, v, r) for v, r in votes], model="m")
    assert found.figures["maj@5"].mean == 0
    votes = [(1, "18"), (1, "18.0"), (0, "odd"), (0, "even"), (0, "2 (a) b")]
    found = result(replace(JUDGED, samples=5, k=(5,)), [sample(0, v, r) for v, r in votes], model="m")
    assert found.figures["maj@5"].mean == 1


def test_a_result_reads_back(tmp_path):
    found = result(JUDGED, [sample(0, 1.0, "1") for _ in range(4)], model="m", step=3)
    found.write(tmp_path / "r.json")
    again = Result.read(tmp_path / "r.json")
    assert (again.figures, again.by_source, again.step) == (found.figures, found.by_source, 3)
    (tmp_path / "r.json").write_text(json.dumps({"figures": 3}))
    with pytest.raises(ValueError, match=r"r.json: not a result of an evaluation"):
        Result.read(tmp_path / "r.json")


def test_two_models_are_compared_prompt_by_prompt():
    before, after = (
        result(JUDGED, [sample(i, float(j < n)) for i, n in enumerate(right) for j in range(4)], model="m")
        for right in ([0, 2, 4, 1], [1, 3, 4, 2])
    )
    # differences 1/4, 1/4, 0, 1/4: mean .1875, standard error .0625, t = 3.18245
    line = "m, right by judge: +0.188  (-0.011 to +0.386), prompt by prompt over 4"
    assert differences([before, after]) == [line]


def test_prompts_of_the_same_text_are_two():
    found = per_prompt(JUDGED, [sample(i, 1.0) for i in (0, 1) for _ in range(4)])
    assert len(found) == 2


# Recipes.


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (3, "eval_sets[0]=3: not a mapping"),
        ({}, "missing"),
        ({"name": "a b"}, "name='a b'"),
        ({"name": "t", "sample": 3}, "eval_sets[0].sample=3: no such key. Did you mean 'samples'"),
        ({"name": "t", "samples": 0}, "samples=0: must be 1 or more"),
        ({"name": "t", "samples": "many"}, "samples='many'"),
        ({"name": "t", "samples": 4, "k": [8]}, "k=8 with samples=4: out of range"),
        ({"name": "t", "samples": 4, "temperature": 0}, "greedy samples are all equal"),
        ({"name": "t", "temperature": -1.0}, "temperature=-1.0: must be 0 or more"),
        ({"name": "t", "top_p": 0.0}, "top_p=0"),
        ({"name": "t", "judge": "acuracy"}, "Did you mean 'accuracy'"),
        ({"name": "t", "reward_funcs": ["nonsense"]}, "nonsense"),
        ({"name": "t", "every": 0}, "every=0: must be 1 or more"),
        ({"name": "t", "dataset_name": "./nowhere.csv"}, "nowhere.csv"),
    ],
)
def test_a_mistake_in_a_set_is_told(entry, words):
    sets, problems = parse_eval_sets([entry], [RewardSpec("accuracy", "accuracy")])
    assert not sets
    assert any(words in str(problem) for problem in problems), problems


def test_a_recipe_tells_of_its_sets(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model_name_or_path: quickstart\ndataset_name: quickstart/addition\nreward_funcs: [accuracy]\nuse_cpu: true\n"
        "bf16: false\nreport_to: none\neval_sets: [{name: t, samples: 2}, {name: t, limit: 0}, {name: t}]\n"
    )
    with pytest.raises(ConfigError) as error:
        load_recipe(["--config", str(path)])
    assert "eval_sets[1].limit=0" in str(error.value)
    assert "2 sets have the name 't'" in str(error.value)


def test_check_tells_of_a_set_without_rows(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "solution": "1"}\n' * 8)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model_name_or_path: quickstart\ndataset_name: {tmp_path / 'data.jsonl'}\nreward_funcs: [accuracy]\n"
        "use_cpu: true\nbf16: false\nreport_to: none\nmax_completion_length: 16\n"
        "eval_sets: [{name: held}, {name: far, dataset_name: org/on_the_hub}]\n"
    )
    with pytest.raises(ConfigError, match=r"eval_sets: held: dataset_test_split='test'") as error:
        load_recipe(["--config", str(path)], Preflight())
    assert len(error.value.problems) == 1


def test_the_mode_is_that_before_also_after_an_error(trainer):
    one = trainer()
    with pytest.raises(RuntimeError, match="no"), evaluating(one, SET):
        raise RuntimeError("no")
    assert one.model.training
