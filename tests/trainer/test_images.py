"""Prompts with images train by the gradient of each row computed by itself, wherever rows are moved or left out."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.config.images import described
from grpo_ext.data.config import DataConfig
from grpo_ext.data.images import with_images
from grpo_ext.data.loading import load_datasets
from grpo_ext.errors import ConfigError, DataError
from grpo_ext.packing.images import COUNT, IMAGES
from grpo_ext.packing.micro_batches import MicroBatch, of_active_rows, regroup, rows_of, trim
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train
from grpo_ext.trainer.nan_report import on_cpu
from support import seeing, tiny

ROUNDING = 1e-10
RAGGED = (1, 2, 0, 1)
"""Images of the prompts of a generation."""
SETTINGS = tiny.TRAINING | {
    "loss_type": "grpo",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_steps": 1,
    "max_grad_norm": 1e9,
    "learning_rate": 0.01,
    "optim": "sgd",
    "shuffle_dataset": False,
}
pytestmark = pytest.mark.filterwarnings("ignore")


class Watched(GRPOExtTrainer):
    """Keeps the micro-batches of the first step."""

    def _compute_loss(self, model: Any, inputs: MicroBatch) -> Tensor:
        self.seen = [*getattr(self, "seen", []), inputs] if self.model.training else []
        return super()._compute_loss(model, inputs)


def silent_without_images(completions, images, **_):
    """0 for all completions of a prompt without images."""
    return [score * bool(seen) for score, seen in zip(tiny.spread(completions), images, strict=True)]


def build(family, folder, data, reward=tiny.spread, kind=Watched, evaluated=None, **settings):
    args = GRPOExtConfig if issubclass(kind, GRPOExtTrainer) else GRPOConfig
    return kind(
        model=settings.pop("model", None) or seeing.model(family),
        reward_funcs=[reward],
        args=args(output_dir=str(folder), **(SETTINGS | settings)),
        train_dataset=data,
        eval_dataset=evaluated,
        processing_class=seeing.processor(family),
    )


def same_row(family: str, batch: MicroBatch, i: int, data: Dataset) -> dict[str, Any]:
    """Return the row of the dataset whose prompt and images a row of a micro-batch has."""
    ids = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
    for row in data:
        made = seeing.ids_of(family, row)
        pixels, found = made.get("pixel_values"), batch[IMAGES][i].get("pixel_values")
        same = pixels is None if found is None else pixels is not None and torch.equal(pixels, found)
        if same and torch.equal(made["input_ids"][0], ids):
            return row
    raise AssertionError("no row of the dataset has this prompt")


def by_rows(family: str, policy: Any, batches: Sequence[MicroBatch], data: Dataset) -> tuple[float, Tensor]:
    """Largest error of the old log-probabilities, and GRPO's loss on the policy, each row computed by itself."""
    rows = sum(int(batch["completion_mask"].any(dim=1).sum()) for batch in batches)
    error, loss = 0.0, torch.zeros(())
    for batch in batches:
        for i, (ids, mask) in enumerate(zip(batch["completion_ids"], batch["completion_mask"], strict=True)):
            if not mask.any():  # cut short
                continue
            logps = seeing.alone(family, policy, same_row(family, batch, i, data), ids[mask.bool()].tolist())
            if batch["advantages"][i]:  # rows without one may be left out of the forward
                error = max(error, (logps.detach() - batch["old_per_token_logps"][i, : len(logps)]).abs().max().item())
            loss = loss - (batch["advantages"][i] * logps).mean() / rows
    return error, loss


def step_of(family: str, folder: Any, data: Dataset, **settings: Any) -> tuple[list[MicroBatch], float, float]:
    """Train a step; return its micro-batches, and the errors of log-probabilities and of the update."""
    with seeing.float64_throughout():
        policy = seeing.model(family)
        trainer = build(family, folder, data, model=policy, **settings)
        trainer.train()
        fresh = seeing.model(family)
        error, loss = by_rows(family, fresh, trainer.seen, data)
        loss.backward()
    rate = SETTINGS["learning_rate"]
    pairs = [(p, q, q.grad) for p, q in zip(policy.parameters(), fresh.parameters(), strict=True)]
    off = max((p - (q if g is None else q - rate * g)).abs().max().item() / rate for p, q, g in pairs)
    moved = max(g.abs().max().item() for _, _, g in pairs if g is not None)
    assert moved > 1e-3
    return trainer.seen, error, off


CASES = {
    "gemma3": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    "idefics3": {"loss_defaults": "trl"},
    "llava": {"skip_zero_advantages": False},
    "llava_next": {},
    "qwen2_5_vl": {"pad_to_multiple_of": 8},
    "qwen3_vl": {"mask_truncated_completions": True, "max_completion_length": 24},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("family", "settings"), CASES.items(), ids=CASES)
def test_the_gradient_is_that_of_each_row_by_itself(family, settings, tmp_path):
    batches, error, off = step_of(family, tmp_path, seeing.rows(RAGGED), reward=silent_without_images, **settings)
    assert sum(int(row[COUNT]) for batch in batches for row in batch[IMAGES]) == 4 * sum(RAGGED)
    assert max(error, off) < ROUNDING


def test_fresh_prompts_with_images_replace_silent_groups(tmp_path):
    family, settings = "idefics3", {"dynamic_sampling": "reward", "gradient_accumulation_steps": 1}
    settings |= {"per_device_train_batch_size": 8, "rollout_engine": "generate"}
    data = seeing.rows([0, 1, 2, 1])  # a step has two prompts, of which the first is silent
    batches, error, off = step_of(family, tmp_path, data, reward=silent_without_images, **settings)
    assert all(batch["advantages"].any() for batch in batches)
    assert max(error, off) < ROUNDING


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["idefics3", "llava_next", "qwen2_5_vl"])  # pixels by row, patch and grid
def test_rows_of_micro_batches_may_be_regrouped_trimmed_and_scored_in_parts(family, tmp_path):
    with seeing.float64_throughout():
        one = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
        trainer = build(family, tmp_path, seeing.rows(RAGGED), learning_rate=0.0, beta=0.1, **one)
        trainer.train()
        (everything,) = trainer.seen
        assert everything["ref_per_token_logps"].sub(everything["old_per_token_logps"]).abs().max() < ROUNDING
        everything["row"] = torch.arange(16)
        parts = [rows_of(everything, torch.arange(i, i + 4)) for i in range(0, 16, 4)]
        moved = rows_of(everything, torch.randperm(16, generator=torch.Generator().manual_seed(1)))
        kinds = [*regroup(parts, len(parts)), trim(moved), rows_of(moved, torch.tensor([3]))]
        for batch in kinds:
            for size in (None, 3):
                score = trainer._get_per_token_logps_and_entropies
                logps = trainer._scorer.micro_batch(score, trainer.model, batch, batch_size=size)[0]
                for i, row in enumerate(batch["row"].tolist()):
                    length = int(batch["completion_mask"][i].sum())
                    known = everything["old_per_token_logps"][row, :length]
                    assert (logps[i, :length] - known).abs().max() < ROUNDING


def alike(count: int) -> Dataset:
    """Prompts with the same tokens, each with another picture of one size."""
    prompt = [{"role": "user", "content": "what is it?"}]
    return Dataset.from_list([{"prompt": prompt, "image": seeing.picture(i)} for i in range(count)])


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gemma3", "idefics3", "qwen3_vl"])
def test_each_completion_is_sampled_with_its_own_picture(family, tmp_path):
    data = alike(4)
    with seeing.float64_throughout():
        trainer = build(family, tmp_path, data, temperature=1e-6, learning_rate=0.0)
        trainer.train()
    chosen = set()
    for batch in trainer.seen:
        for i, (ids, mask) in enumerate(zip(batch["completion_ids"], batch["completion_mask"], strict=True)):
            sampled = ids[mask.bool()].tolist()
            scores = seeing.logits(family, trainer.model, same_row(family, batch, i, data), sampled)
            scores[:, trainer.model.config.image_token_id] = -torch.inf  # TRL never samples it
            assert scores.argmax(dim=-1).tolist() == sampled
            chosen.add(tuple(sampled))
    assert len(chosen) > 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_stock_trl_makes_the_same_steps(family, tmp_path):
    seeing.model(family).save_pretrained(tmp_path / "model")
    weights, settings = [], {"max_steps": 2, "beta": 0.1, "model_init_kwargs": {"dtype": torch.float64}}
    for kind, own in ((GRPOTrainer, {}), (GRPOExtTrainer, {"loss_defaults": "trl"})):
        with seeing.float64_throughout():
            data, folder = seeing.rows((1, 2, 1, 2) * 2), tmp_path / kind.__name__
            trainer = build(family, folder, data, kind=kind, model=str(tmp_path / "model"), **settings, **own)
            trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert (weights[0] - weights[1]).abs().max() < ROUNDING


@pytest.mark.slow
def test_a_recipe_trains_and_evaluates_a_model_of_images(tmp_path):
    for part in (seeing.model("llava", dtype=torch.float32), seeing.processor("llava")):
        part.save_pretrained(tmp_path / "model")
    seeing.rows((1,) * 8, column="image").save_to_disk(tmp_path / "data")
    recipe = SETTINGS | {
        **{"model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "data"), "test_size": 4},
        **{"output_dir": str(tmp_path / "run"), "reward_funcs": [{"name": "support.tiny:spread"}]},
        **{"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "use_cpu": True},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    log = train(load_recipe(["--config", str(tmp_path / "recipe.yaml")])).state.log_history
    assert any(entry.get("grad_norm", 0.0) > 0 for entry in log)
    assert any("eval_rewards/spread/mean" in entry for entry in log)


def test_evaluation_data_may_have_the_other_column(tmp_path):
    model, one = seeing.model("llava", dtype=torch.float32), seeing.rows((1,) * 4, column="image")
    trainer = build("llava", tmp_path, seeing.rows(RAGGED), model=model, evaluated=one, per_device_eval_batch_size=4)
    assert "eval_rewards/spread/mean" in trainer.evaluate()


def test_a_dump_holds_the_images_of_a_prompt_once(tmp_path):
    trainer = build("idefics3", tmp_path, seeing.rows(RAGGED), model=seeing.model("idefics3", dtype=torch.float32))
    trainer.train()
    torch.save([on_cpu(batch) for batch in trainer.seen], tmp_path / "batches.pt")
    rows = [row for batch in torch.load(tmp_path / "batches.pt") for row in batch[IMAGES]]
    stored = {row["pixel_values"].data_ptr() for row in rows if "pixel_values" in row}
    assert len(stored) == 3  # one for each prompt that has images, not for each of its completions


def test_rows_without_an_advantage_leave_a_forward_over_one_image_for_the_processes_that_wait(tmp_path):
    trainer = build("llava", tmp_path, seeing.rows(RAGGED), model=seeing.model("llava", dtype=torch.float32))
    seen = []

    def forward(batch):
        seen.append(batch)
        logps = torch.ones_like(batch["completion_mask"], dtype=torch.double, requires_grad=True)
        return logps, logps.detach(), None

    trainer.train()
    batch = next(batch for batch in trainer.seen if any(int(row[COUNT]) for row in batch[IMAGES]))
    none = torch.zeros(len(batch["advantages"]), dtype=torch.bool)
    logps, _ = of_active_rows(forward, batch, none)
    assert [int(row[COUNT]) > 0 for row in seen[0][IMAGES]] == [True]
    assert seen[0]["completion_ids"].shape == (1, batch["completion_ids"].shape[1])
    assert logps.requires_grad


REFUSED = {
    "rollout_engine='process': the decoder of the process": {"rollout_engine": "process"},
    "rollout_func: it returns tokens, and not where the images": {"rollout_func": print},
    "the processor is a TokenizersBackend": {"processing_class": seeing.tokenizer("llava")},
    "TRL reads 'images' where both are given": {"columns": {"image": "a.png", "images": ["a.png"]}},
    "it holds lists. Rename the column to 'images'": {"columns": {"image": ["a.png"]}},
    "it holds single values. Rename the column to 'image'": {"columns": {"images": "a.png"}},
    "no file 'no.png'": {"columns": {"image": "no.png"}},
    "it holds Value('int64')": {"columns": {"image": 3}},
    "the prompts are text": {"columns": {"prompt": "what?", "image": "a.png"}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_shown_right_with_images_is_refused_at_the_start(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seeing.picture(0).save("a.png")
    given = dict(REFUSED[words])
    row = {"prompt": [{"role": "user", "content": "a:"}], **given.pop("columns", {"image": "a.png"})}
    arguments = {name: given.pop(name) for name in ("rollout_func", "processing_class") if name in given}
    with pytest.raises((ConfigError, DataError)) as refused:
        GRPOExtTrainer(
            model=seeing.model("llava"),
            reward_funcs=[tiny.spread],
            args=GRPOExtConfig(output_dir="run", **(SETTINGS | given)),
            train_dataset=[row] * 4,
            **{"processing_class": seeing.processor("llava"), **arguments},
        )
    assert words in str(refused.value)


def test_a_recipes_files_may_hold_paths_and_parquet_bytes(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    pictures = [seeing.picture(i) for i in range(3)]
    for i, one in enumerate(pictures):
        one.save(folder / f"{i}.png")
    prompt = [{"role": "user", "content": "a:"}]
    rows = [{"prompt": prompt, "images": [f"{i}.png" for i in range(count)]} for count in (1, 2, 0)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoded = [{"bytes": (folder / f"{i}.png").read_bytes(), "path": None} for i in range(3)]
    Dataset.from_list([{"prompt": prompt, "image": one} for one in encoded]).to_parquet(folder / "one.parquet")
    several, _ = load_datasets(str(folder / "train.jsonl"), DataConfig(), eval_needed=False)
    single, _ = load_datasets(str(folder / "one.parquet"), DataConfig(), eval_needed=False)
    assert [[one.tobytes() for one in row] for row in several["images"]] == [
        [one.tobytes() for one in pictures[:count]] for count in (1, 2, 0)
    ]
    assert [one.tobytes() for one in single["image"]] == [one.tobytes() for one in pictures]
    with pytest.raises(DataError, match="the tokens of images would not be counted"):
        load_datasets(str(folder / "train.jsonl"), DataConfig(max_prompt_length=9), eval_needed=False)


def test_the_table_of_completions_shows_the_sizes_of_images():
    prompt = with_images({"prompt": [{"role": "user", "content": "a:"}], "image": seeing.picture(0, 84, 56)})
    assert described(prompt)[0]["content"] == "[image 84x56]a:"


def test_an_image_beside_a_text_is_refused():
    with pytest.raises(DataError, match="the prompt is text, which has no place for images"):
        with_images({"prompt": "a:", "image": seeing.picture(0, 84, 56)})


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_samples_what_the_whole_run_does(tmp_path):
    """Rows with images, then rows of text, then images again: each batch chooses what decodes it."""
    rows, logs = seeing.rows((1, 1, 0, 0, 1, 1, 0, 0)), []
    settings = tiny.TRAINING | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.01}
    for name in ("whole", "resumed"):
        args = GRPOExtConfig(str(tmp_path / name), shuffle_dataset=False, **settings)
        model, words = seeing.model("idefics3", dtype=torch.float32), seeing.processor("idefics3")
        trainer = GRPOExtTrainer(model, [lengths], args, rows, processing_class=words)
        trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2") if name == "resumed" else None)
        logs.append([(entry["reward"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
    assert len(logs[0]) == 4
    assert logs[0] == logs[1]


def lengths(completions, **_):
    return [sum(map(ord, one[-1]["content"])) % 97 / 97 for one in completions]
