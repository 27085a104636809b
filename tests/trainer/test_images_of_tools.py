"""Images that TRL's tools and environments return are seen by the next turn, and trained on where they are."""

import copy
import itertools

import pytest
import torch
from test_images import ROUNDING, SETTINGS

from grpo_ext import GRPOExtConfig
from grpo_ext.errors import ConfigError
from support import seeing, tiny

CALLS = SETTINGS | {"max_completion_length": 60, "max_tool_calling_iterations": 2, "learning_rate": 0.0, "seed": 3}
pytestmark = pytest.mark.filterwarnings("ignore")


def shown(number):
    return [
        {"type": "image", "image": seeing.picture(number, *seeing.SIZES[number % 4])},
        {"type": "text", "text": "b"},
    ]


class Painter:
    """An environment of TRL's whose first observation is a picture, and whose tool returns one."""

    def reset(self, **_):
        self.number = 0
        return shown(100)

    def look(self) -> list:
        """Look."""
        self.number += 1
        return shown(self.number)


def build(family, folder, *, kind=seeing.Watched, dtype=torch.float64, data=None, **options):
    numbers = itertools.count()

    def look() -> list:
        """Look."""
        return shown(next(numbers))

    words = seeing.processor(family)
    words.tokenizer.response_template = copy.deepcopy(seeing.CALLS)
    model = seeing.model(family, dtype=dtype)
    model.generation_config.eos_token_id = [1, *range(30, len(seeing.WORDS))]  # so that turns are short
    rollouts = {"environment_factory": Painter} if options.pop("painted", False) else {"tools": [look]}
    return kind(
        model=model,
        reward_funcs=[lambda completions, **_: tiny.spread(completions)],
        args=GRPOExtConfig(output_dir=str(folder), **(CALLS | options)),
        train_dataset=data or seeing.rows((1, 0, 2, 0)),
        processing_class=words,
        **rollouts,
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "painted"), [*((one, False) for one in ("gemma3", "idefics3", "qwen2_5_vl")), ("qwen2_5_vl", True)]
)
def test_a_turn_sees_what_the_tools_returned_and_so_does_the_loss(family, painted, tmp_path):
    with seeing.float64_throughout():
        trainer = build(family, tmp_path, painted=painted, beta=0.1)
        trainer.train()
        made, batch = trainer.generated, trainer.batch
        rows = zip(made.prompt_ids, made.completion_ids, made.tool_mask, made.logprobs, made.images, strict=True)
        for i, (prompt, ids, mask, drawn, images) in enumerate(rows):
            said, drawn = torch.tensor(mask) > 0, torch.tensor(drawn, dtype=torch.double)
            scores = seeing.scored_row(family, trainer.model, prompt + ids, images)[len(prompt) - 1 : -1]
            known = batch["ref_per_token_logps"][i, : len(ids)]
            assert (known - seeing.of(scores, ids))[said].abs().max() < ROUNDING
            scores[:, trainer.model.config.image_token_id] = -torch.inf  # TRL never samples it
            assert (drawn - seeing.of(scores, ids))[said].abs().max() < ROUNDING
    assert sum(map(bool, made.tool_images)) > 1
    assert any(row and mask[-1] for row, mask in zip(made.tool_images, made.tool_mask, strict=True))


@pytest.mark.parametrize("settings", [{}, {"loss_type": "dapo", "epsilon_high": 0.3}, {"top_p": 0.9}])
def test_a_step_is_made_with_images_of_tools(settings, tmp_path):
    settings = {"learning_rate": 0.01, "per_device_train_batch_size": 2, "max_steps": 2} | settings
    trainer = build("qwen2_5_vl", tmp_path, dtype=torch.float32, **settings)
    trainer.train()
    log = trainer.state.log_history
    assert any(entry.get("grad_norm", 0) > 0 for entry in log)
    if "top_p" in settings:
        assert all(entry["sampling/mismatch"] < 1e-5 for entry in log if "sampling/mismatch" in entry)


def test_a_token_has_the_support_of_its_own_picture(tmp_path):
    """Many rows have the same tokens, each with one of four pictures."""
    data = [{"prompt": [{"role": "user", "content": "what is it?"}], "image": seeing.picture(i)} for i in range(4)]
    trainer = build("qwen2_5_vl", tmp_path, dtype=torch.float32, data=data, top_p=0.7, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/mismatch"] < 1e-5


def test_cut_completions_that_hold_images_are_not_hidden_from_the_model(tmp_path):
    trainer = build("idefics3", tmp_path, dtype=torch.float32, mask_truncated_completions=True)
    with pytest.raises(ConfigError, match="mask_truncated_completions=True: a tool or an environment"):
        trainer.train()
