"""One recipe with a component of every kind, trained on the quickstart's task."""

import json

import pytest
import test_reward_model
import yaml
from test_remote import serve  # noqa: F401  (a fixture)

from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train


def judge(path, body, count):
    """An OpenAI-compatible judge that likes long texts."""
    return {"choices": [{"message": {"role": "assistant", "content": f"Score: {len(json.dumps(body)) % 10}"}}]}


@pytest.mark.slow
def test_a_recipe_of_ten_components_trains(serve, quickstart_model, tmp_path):  # noqa: F811
    reward_model = test_reward_model.save(tmp_path / "rm", max_position_embeddings=512)
    entries = [
        {"name": "accuracy", "weight": 1.0, "timeout": 30, "on_error": "none"},
        {"name": "format", "weight": 0.5, "weight_schedule": {"kind": "linear", "to": 0.1}},
        {"name": "tags", "weight": 0.5, "weight_schedule": [[0, 0.5], [1, 0.25]], "scale": 2.0, "clip": [0, 1]},
        {"name": "soft_overlong", "weight": 0.2, "kwargs": {"max_length": 16, "buffer": 8}},
        {"name": "repetition", "weight": 0.1, "kwargs": {"n": 2}},
        {"name": "minimind", "weight": 0.3, "kwargs": {"reward_model": {"model": reward_model}}},
        {"name": "rm", "func": "reward_model", "weight": 0.1, "kwargs": {"model": reward_model, "score_clip": 3.0}},
        {
            "name": "judge",
            "func": "remote",
            "weight": 0.1,
            "scale": 0.1,
            "kwargs": {"url": f"{serve(judge).url}/v1/chat/completions", "protocol": "openai_judge", "model": "any"},
        },
        {"name": "letters", "func": "support.faulty:letters", "when": "solution", "retries": 1, "on_error": "zero"},
        {"name": "patient", "func": "support.faulty:patient", "weight": 0.0, "timeout": 20},
        {"name": "code", "weight": 0.2, "when": "tests"},
    ]
    recipe = {
        "model_name_or_path": quickstart_model,
        "dataset_name": "quickstart/addition",
        "loss_type": "dr_grpo",
        "reward_funcs": entries,
        "reward_workers": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 16,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "output_dir": str(tmp_path / "out"),
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    path = tmp_path / "ten.yaml"
    path.write_text(yaml.safe_dump(recipe))
    trainer = train(load_recipe(["--config", str(path)]))
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(log) == 2
    for entry in entries:
        assert {f"rewards/{entry['name']}/{m}" for m in ("mean", "none_frac", "errors", "seconds")} <= set(log[0])
        assert log[0][f"rewards/{entry['name']}/errors"] == 0, entry["name"]
    assert log[0]["rewards/code/none_frac"] == 1.0
    assert log[0]["rewards/judge/mean"] is not None
    assert log[0]["rewards/rm/std"] > 0
    weights = dict(zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True))
    assert [weights["format"], weights["tags"]] == pytest.approx([0.3, 0.25])
    scored = {name: w for name, w in weights.items() if name != "code"}  # it scored nothing: the rest is scaled up
    total = sum(log[1][f"rewards/{name}/mean"] * w for name, w in scored.items())
    assert log[1]["reward"] == pytest.approx(total * sum(weights.values()) / sum(scored.values()), abs=1e-4)
