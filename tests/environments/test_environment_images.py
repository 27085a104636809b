"""Images that environments show are seen by the next turn, and trained on where they are."""

import copy
import re

import pytest
import torch
from PIL import Image

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.config.images import in_parts
from grpo_ext.environments.loop import _state
from grpo_ext.environments.rendering import CannotRender, Renderer
from support import chat_templates, painters, seeing, tiny
from support.vllm_runs import HEADS

HERE = painters.__file__
ROUNDING = 1e-9
ASKED = [{"prompt": [{"role": "user", "content": "abcdefgh"[i]}]} for i in range(8)]
SETTINGS = tiny.TRAINING | {
    "learning_rate": 0.0,
    "max_completion_length": 60,
    "completion_length_counts": "policy",
    "max_steps": 1,
    "seed": 3,
}
pytestmark = pytest.mark.filterwarnings("ignore")


def build(family, folder, environment, *, rows=None, dtype=torch.float64, **options):
    words = seeing.processor(family)
    words.tokenizer.response_template = copy.deepcopy(seeing.CALLS)
    model = seeing.model(family, dtype=dtype, max_position_embeddings=512)
    seeing.prefer(model, words.tokenizer.eos_token_id, 3.0)  # so that turns are short
    return seeing.Watched(
        model,
        None,
        GRPOExtConfig(str(folder), **(SETTINGS | options)),
        seeing.rows((1, 0, 2, 0)) if rows is None else rows,
        processing_class=words,
        environments=[environment],
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((one, "Gallery") for one in ("gemma3", "idefics3", "qwen2_5_vl", "llava")), ("qwen2_5_vl", "Painter")],
)
def test_a_turn_sees_what_the_environment_shows_and_so_does_the_loss(family, kind, tmp_path):
    with seeing.float64_throughout():
        trainer = build(family, tmp_path, f"{HERE}:{kind}", beta=0.1)
        trainer.train()
        made, batch = trainer.generated, trainer.batch
        assert made.extra["trajectory"][0].failure is None
        rows = zip(made.prompt_ids, made.completion_ids, made.tool_mask, made.logprobs, made.images, strict=True)
        for i, (prompt, ids, mask, drawn, images) in enumerate(rows):
            said, drawn = torch.tensor(mask) > 0, torch.tensor(drawn, dtype=torch.double)
            scores = seeing.scored_row(family, trainer.model, prompt + ids, images)[len(prompt) - 1 : -1]
            known = batch["ref_per_token_logps"][i, : len(ids)]
            assert (known - seeing.of(scores, ids))[said].abs().max() < ROUNDING
            scores[:, trainer.model.config.image_token_id] = -torch.inf  # it is never sampled
            assert (drawn - seeing.of(scores, ids))[said].abs().max() < ROUNDING
    assert sum(map(bool, made.tool_images)) > 1


@pytest.mark.parametrize(
    "settings", [{"loss_type": "dapo", "epsilon_high": 0.3}, {"top_p": 0.9}, {"num_iterations": 2}]
)
def test_a_step_is_made_with_images_of_environments(settings, tmp_path):
    settings = {"learning_rate": 0.01, "per_device_train_batch_size": 4, "max_steps": 2} | settings
    trainer = build("qwen2_5_vl", tmp_path, f"{HERE}:Gallery", dtype=torch.float32, **settings)
    trainer.train()
    log = trainer.state.log_history
    assert any(entry.get("grad_norm", 0) > 0 for entry in log)
    assert log[0]["environments/Gallery/failed"] == 0
    if "top_p" in settings:
        assert all(entry["sampling/mismatch"] < 1e-5 for entry in log if "sampling/mismatch" in entry)


@pytest.mark.slow
def test_it_learns_what_an_environment_shows(tmp_path):
    """In the second turn; the same letter for all pictures is right for half."""
    rows, model = (
        seeing.coloured(16).remove_columns("image"),
        seeing.save(tmp_path / "model", ends=20.0, **HEADS, head_dim=32),
    )
    options = {"max_steps": 30, "learning_rate": 2e-3, "per_device_train_batch_size": 32, "num_generations": 8}
    args = GRPOExtConfig(str(tmp_path), **(SETTINGS | options))
    words = seeing.processor("idefics3")
    trainer = GRPOExtTrainer(model, None, args, rows, processing_class=words, environments=[painters.Shown])
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards[0] < 0.5
    assert sum(rewards[-8:]) / 8 > 0.7


@pytest.mark.parametrize("family", seeing.FAMILIES)
def test_a_conversation_has_the_ids_that_its_processor_makes_of_the_whole(family):
    words = seeing.processor(family)
    renderer = Renderer(words, {})
    shown = [painters.part(seeing.picture(n, *seeing.SIZES[n])) for n in range(3)]
    text = {"type": "text", "text": "b"}
    opening = [{"role": "user", "content": [shown[0], text]}]
    news = [{"role": "user", "content": [text, shown[1], shown[2]]}]
    context = renderer.opening(opening, None)
    sampled = words.tokenizer.convert_tokens_to_ids(["c", "<eos>"])
    said = {"role": "assistant", "content": "c"}
    context, _ = renderer.following(context, sampled, opening, said, news, None)
    whole = [*opening, in_parts(said), *news]
    [ids] = words.apply_chat_template([whole], tokenize=True, return_dict=True)["input_ids"]
    assert context.ids == list(ids)
    assert [image.size for image in context.images] == [one["image"].size for one in shown]


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_a_space_that_a_template_prints_before_an_answer_rewrites_nothing(name):
    words = seeing.processor("idefics3")
    words.chat_template = (chat_templates.FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    renderer, shown = Renderer(words, {}), [painters.part(painters.painted("red"))]
    opening, news = [{"role": "user", "content": shown}], [{"role": "user", "content": shown}]
    context = renderer.opening(opening, None)
    sampled = words.tokenizer.convert_tokens_to_ids([" ", "c", "<end_of_utterance>"])
    context, said = renderer.following(context, sampled, opening, {"role": "assistant", "content": " c"}, news, None)
    whole = [*opening, in_parts(said), *news]
    [ids] = words.apply_chat_template([whole], tokenize=True, return_dict=True, add_generation_prompt=True)[
        "input_ids"
    ]
    assert context.ids == list(ids)


def fails(folder, fault, kind="idefics3", **options):
    entry = {"path": f"{HERE}:Faulty", "kwargs": {"fault": fault}, "max_turns": 3}
    trainer = build(kind, folder, entry, rows=ASKED, dtype=torch.float32, **options)
    trainer.train()
    return trainer.generated.extra["trajectory"][0].failure


@pytest.mark.parametrize(
    ("fault", "options", "reason"),
    [
        ("url", {}, "garbage: step: it returned content of type 'image_url', and environments carry text and images"),
        ("path", {}, "garbage: step: .* holds no image"),
        ("empty", {}, "garbage: step: .* holds no image"),
        ("bytes", {}, "garbage: step: .* holds no image"),
        ("afresh", {}, "template: a conversation with images cannot begin afresh"),
        ("none", {"micro_batch_tokens": 512}, "template: a message holds an image: micro_batch_tokens=512: "),
    ],
)
def test_what_cannot_be_shown_costs_its_episode(fault, options, reason, tmp_path):
    failure = fails(tmp_path, fault, **options)
    assert re.match(reason, failure), failure


def test_a_model_of_text_reads_no_images(tmp_path):
    args = GRPOExtConfig(str(tmp_path), **SETTINGS)
    entry = {"path": f"{HERE}:Faulty", "kwargs": {"fault": "none"}}
    trainer = seeing.Watched(tiny.model(), None, args, ASKED, processing_class=tiny.tokenizer(), environments=[entry])
    trainer.train()
    failures = [one.failure for one in trainer.generated.extra["trajectory"] if one.failure]
    assert failures
    assert all("reads text only" in one for one in failures)


def test_a_template_that_leaves_out_an_image_is_seen():
    words = seeing.processor("idefics3")
    words.chat_template = words.chat_template.replace("<image>", "")
    message = {"role": "user", "content": [painters.part(painters.painted("red")), {"type": "text", "text": "a"}]}
    with pytest.raises(CannotRender, match="leaves out a message of role 'user'"):
        Renderer(words, {}).opening([message], None)


@pytest.mark.parametrize("shared_prefix", ["auto", "true", "false"])
def test_a_batch_may_have_images_and_rewritten_contexts(shared_prefix, tmp_path):
    options = {"beta": 0.1, "num_generations": 2, "shared_prefix": shared_prefix}
    trainer = build("qwen2_5_vl", tmp_path, f"{HERE}:Mixed", rows=ASKED, dtype=torch.float32, **options)
    trainer.train()
    trajectories, batch = trainer.generated.extra["trajectory"], trainer.batch
    assert "parents" in batch
    assert any(trainer.generated.images)
    for known, one in zip(batch["ref_per_token_logps"], trajectories, strict=True):
        places = torch.tensor(one.tree.turns)
        for number, turn in enumerate(one.turns):
            row, begin = turn.context + turn.sampled, len(turn.context)
            scores = seeing.scored_row("qwen2_5_vl", trainer.model, row, turn.images)[begin - 1 : -1]
            of_turn = known[: len(places)][places == number]
            assert (of_turn - seeing.of(scores, turn.sampled)).abs().max() < 1e-4


def test_states_differ_by_the_colours_of_a_palette():
    red, blue = ([painters.part(Image.new("P", (28, 28), colour))] for colour in ("red", "blue"))
    states = [_state([{"role": "user", "content": parts}]) for parts in (red, blue, red)]
    assert states[0] == states[2] != states[1]


def test_a_prompt_may_name_an_image_by_its_path(tmp_path):
    painters.painted("red").save(tmp_path / "red.png")
    parts = [painters.part(str(tmp_path / "red.png")), {"type": "text", "text": "a"}]
    rows = [{"prompt": [{"role": "user", "content": parts}]}] * 8
    trainer = build("qwen2_5_vl", tmp_path / "run", f"{HERE}:Gallery", rows=rows, dtype=torch.float32)
    trainer.train()
    assert trainer.state.log_history[0]["environments/Gallery/failed"] == 0


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_turn_with_images_is_drawn_by_the_numbers_of_its_episode(evaluates, tmp_path):
    """Whatever was sampled by torch's random state before it, and whichever turns were in its wave."""
    sampled = []
    for waves in ("ready", "turn"):
        trainer = build(
            "qwen2_5_vl", tmp_path, f"{HERE}:Mixed", rows=ASKED, dtype=torch.float32, environment_waves=waves
        )
        torch.rand(len(waves))
        trainer.evaluate(trainer.train_dataset) if evaluates else trainer.train()
        figures = trainer.state.log_history[0]
        sampled.append((trainer.generated.completion_ids, figures["eval_reward" if evaluates else "reward"]))
    assert sampled[0] == sampled[1]
