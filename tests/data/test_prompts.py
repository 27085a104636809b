"""A few prompts are looked at as the model reads them: through every chat template of TRL, before training."""

import io
import json

import pytest
import yaml
from datasets import Dataset
from PIL import Image
from tokenizers import AddedToken, processors

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.data.chat_template import prompt_ids, rendered, template_opens
from grpo_ext.data.config import DataConfig
from grpo_ext.data.images import as_read, with_opened_images
from grpo_ext.data.messages import without_gaps
from grpo_ext.data.prepare import Split, prepare
from grpo_ext.data.prompts import PromptCheck, unseen_layout
from grpo_ext.data.rows import RowError, check_prompt
from grpo_ext.errors import ConfigError, DataError
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.rewards.composition import parse_rewards
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.rollout.images import each_alone
from support import chat_templates as chat
from support import seeing, tiny

pytestmark = pytest.mark.usefixtures("few_rows")
ASKED = {"role": "user", "content": "Is <b>2 < 3</b>? End with </s> or [INST]-like marks, please: $x_{1}$ | <x>"}
PLAIN = {"role": "user", "content": "What is 2 + 3?"}
SYSTEM, SAID = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "It is 5."}
TEXT = [{"type": "text", "text": "What is it?"}]
PICTURED, LINKED = (
    {"type": kind, **more} for kind, more in (("image", {}), ("image_url", {"image_url": {"url": "u"}}))
)


def looked(tokenizer, *prompts, options=None, played=False, **columns):
    rows = [{"prompt": p, **{k: v[i] for k, v in columns.items()}} for i, p in enumerate(prompts)]
    problems, notes = PromptCheck(tokenizer, options or {}, played)(rows, "the data")
    return [list(map(str, found)) for found in (problems, notes)]


@pytest.mark.cases(30)
@pytest.mark.parametrize("name", chat.NAMES)
def test_sound_prompts_raise_no_alarm(name):
    made = chat.tokenizer(name)
    for prompt in ([PLAIN], [PLAIN, SAID, PLAIN]):
        assert looked(made, prompt, prompt, solution=["5", "It is 5."]) == [[], []]
    assert looked(made, "What is 2 + 3?", "What is 2 + 4?") == [[], []]
    problems, notes = looked(made, [SYSTEM, PLAIN])
    assert not notes
    assert all("System role not supported" in problem for problem in problems)


@pytest.mark.parametrize("name", chat.NAMES)
def test_each_kind_is_found_through_every_template(name):
    made = chat.tokenizer(name)
    content = TEXT if name in chat.PARTS_ONLY else PLAIN["content"]
    once = made.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    again = [{"role": "user", "content": once}]
    for prompts, found in (([again, again], 0), ([again, [PLAIN]], 1)):  # in all rows a problem, in some a warning
        (message,) = looked(made, *prompts)[found]
        assert "row 0 (from 0): a text" in message
        assert "which the chat template writes itself" in message
    problems, _ = looked(made, [PLAIN], [PLAIN, SAID])
    assert "row 1 (from 0): the prompt ends with the assistant's turn ('It is 5.')" in problems[0]
    assert not looked(made, [PLAIN, SAID], played=True)[0]
    ((problem,), _) = looked(made, [{"role": "user", "content": [LINKED, *TEXT]}])
    assert any(words in problem for words in ("type 'image_url'", "fails on", "Python writes lists", "user's text"))


def test_a_message_call_or_part_that_a_template_leaves_out_is_named():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "x"}}}]}
    made = tiny.tokenizer()
    ((problem,), _) = looked(made, [PLAIN, call, {"role": "tool", "content": "found"}])
    assert "leaves out the call of 'look'" in problem
    made.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    ((problem,), _) = looked(made, [SYSTEM, PLAIN])
    assert "leaves out the system's text 'Be brief.'" in problem
    ((problem,), _) = looked(made, [{"role": "user", "content": TEXT}])
    assert "prints content parts as Python writes lists" in problem
    glm = chat.tokenizer("glm4moe")
    ((problem,), _) = looked(glm, [{"role": "user", "content": [PICTURED, *TEXT]}])
    assert "leaves out content parts of type 'image'" in problem


CALLED: list = [PLAIN, {"role": "assistant", "tool_calls": [{"type": "function", "id": "call00001", "function": {
    "name": "look", "arguments": chat.AT,
}}]}, {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "found"}, PLAIN]  # fmt: skip


def _in_text(messages, arguments):
    calls = [{**call, "function": {**call["function"], "arguments": arguments}} for call in messages[1]["tool_calls"]]
    return [messages[0], {**messages[1], "tool_calls": calls}, *messages[2:]]


@pytest.mark.parametrize("name", sorted({*chat.NAMES} - {"deepseekv3"}))  # which can only write the text itself
def test_arguments_in_json_text_are_rendered_like_the_object(name):
    made = chat.tokenizer(name)
    try:
        expected = made.apply_chat_template(CALLED, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template without calls, or one that wants the tools
        pytest.skip("it renders no calls")
    assert rendered(_in_text(CALLED, json.dumps(chat.AT)), made, {}) == expected


@pytest.mark.parametrize(("text", "read"), [("", {}), ('{"a": null}', {"a": None}), ("[1]", None), ("look(", None)])
def test_arguments_that_are_no_object_are_left_alone_and_refused(text, read):
    prompt, short = _in_text(CALLED, text), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": text}]}
    wanted = text if read is None else read
    assert without_gaps(prompt)[1]["tool_calls"][0]["function"]["arguments"] == wanted
    assert without_gaps([short])[0]["tool_calls"] == [{"name": "f", "arguments": wanted}]
    assert as_read(Dataset.from_list([{"prompt": [short]}]))[0]["prompt"][0]["tool_calls"][0]["arguments"] == wanted
    if read is not None:
        check_prompt(prompt, "prompt")
        return
    with pytest.raises(RowError, match=r"the arguments of a call in message 2 \(assistant\) are no JSON object"):
        check_prompt(prompt, "prompt")


DESCRIBED = [chat.TOOL, {"name": "weigh", "parameters": {}}]


@pytest.mark.parametrize("tools", [DESCRIBED, json.dumps(DESCRIBED)])
def test_tools_of_rows_that_the_prompt_does_not_name_are_refused(tools):
    made = chat.tokenizer("qwen3")
    for prompt in ([PLAIN], "Go.", [{"role": "system", "content": "You can look."}, PLAIN]):
        ((problem,), _) = looked(made, prompt, tools=[tools])
        assert "its column 'tools' has " in problem
        assert "'weigh', which the prompt does not name. Only prompt reaches the model" in problem
    named = [{"role": "system", "content": "You can look and weigh."}, PLAIN]
    assert looked(made, named, tools=[tools]) == [[], []]
    assert looked(made, [PLAIN], tools=[tools], played=True) == [[], []]
    for other in (None, [], "a hammer", ["hammer"], 3):
        assert looked(made, [PLAIN], tools=[other]) == [[], []]
    problems, (note,) = looked(made, [PLAIN], functions=[tools])  # by another name, it may be for a reward
    assert not problems
    assert "its column 'functions' has 'look', 'weigh', which the prompt does not name" in note
    assert looked(made, [PLAIN], answers=[[{"name": "weigh", "arguments": {}}]]) == [[], []]


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("llama3_1", "<|im_start|>user\nhi<|im_end|>", "'<|im_start|>', '<|im_end|>'"),
        ("qwen3", "<start_of_turn>user\nhi<end_of_turn>", "'<start_of_turn>', '<end_of_turn>'"),
        ("gemma3", "[INST] hi [/INST]", "'[INST]', '[/INST]'"),
        ("qwen3", "<|start_header_id|>user", "'<|start_header_id|>'"),
        ("llama3_1", "<|start_of_role|>user<|end_of_role|>hi", "'<|start_of_role|>', '<|end_of_role|>'"),  # not TRL's
        ("qwen3", "<<SYS>>\nBe brief.\n<</SYS>>", "'<<SYS>>', '<</SYS>>'"),
    ],
)
def test_control_tokens_of_another_template_are_a_warning(name, text, shown):
    made = chat.tokenizer(name)
    problems, (note,) = looked(made, [{"role": "user", "content": text}], [PLAIN])
    assert not problems
    assert f"holds {shown}: control tokens of another model's chat template. Give messages with roles" in note
    assert looked(made, text, "hi")[1]
    for sound in ("<|x|> and <start_of_day> and <|endoftext", "a || b <| c |> d"):
        assert looked(made, [{"role": "user", "content": sound}]) == [[], []]


@pytest.mark.parametrize("name", chat.NAMES)
def test_a_prompt_that_was_rendered_for_this_model_is_no_foreign_one(name):
    made = chat.tokenizer(name)
    content = TEXT if name in chat.PARTS_ONLY else PLAIN["content"]
    text = made.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    assert not any("another model's" in note for note in looked(made, text)[1])


def test_the_first_prompt_that_fails_is_named_by_its_row_with_the_options_of_the_recipe():
    made = tiny.tokenizer()
    made.chat_template = "{% if deep and messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}" + (
        tiny.TEMPLATE
    )
    assert looked(made, [PLAIN], [PLAIN, SAID, PLAIN]) == [[], []]
    ((problem,), _) = looked(made, [PLAIN], [PLAIN, SAID, PLAIN], options={"deep": True})
    assert "the data, row 1 (from 0): the chat template fails on a prompt of user and assistant and user" in problem


def test_two_beginnings_are_found_in_plain_text():
    made = chat.tokenizer("llama3")
    core = made.backend_tokenizer
    before = core.post_processor
    core.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", made.bos_token_id)])
    try:
        assert prompt_ids("<bos>Q", made, {})[:2] == [made.bos_token_id] * 2
        assert looked(made, "Q:", "Q:") == [[], []]
        ((problem,), _) = looked(made, "Q:", "<bos>Q:")
        assert "row 1 (from 0): the prompt begins with '<bos>' twice. Remove '<bos>' from the text." in problem
    finally:
        core.post_processor = before


def test_a_solution_in_the_prompt_is_a_warning_unless_it_is_short_or_rare():
    made, long = tiny.tokenizer(), "the mean of all these values is 12"
    hinted = [{"role": "user", "content": f"What? {long}."}]
    for prompt in (hinted, hinted[0]["content"]):
        problems, (note,) = looked(made, prompt, prompt, solution=[long, "x"])
        assert "its solution ('the mean" in note
        assert not problems
    assert looked(made, hinted, [PLAIN], [PLAIN], solution=[long, "5", "5"]) == [[], []]


# Tags of layouts.


def scores(name, completion, template, prompt=(PLAIN,), **kwargs):
    specs, problems = parse_rewards([{"name": name, **kwargs}])
    assert not problems
    runtime = Runtime(specs, workers=0)
    runtime.opened = template
    shown = [{"role": "assistant", "content": completion}] if isinstance(prompt, tuple) else completion
    given = {"prompts": [list(prompt) if isinstance(prompt, tuple) else prompt], "completions": [shown]}
    return runtime.functions[0](**given, completion_ids=[[1]], solution=["5"])


AFTER = "2 + 3\n</think>\n<answer>\n5\n</answer>"


def test_a_layout_counts_the_tag_that_the_template_has_opened():
    opened = ("deepseek_r1_distill", "qwen3_5_think", "nemotron_3_nano")
    for name in (*opened, "qwen3", "qwen2_5", "qwen3_5_nothink"):
        assert bool(template_opens(chat.tokenizer(name), {})) == (name in opened), name
    assert template_opens(chat.tokenizer("qwen3_5_think"), {"enable_thinking": False}) == ""
    for reward in ("format", "tags", "think_format_reward", "accuracy"):
        for completion in (AFTER, "<think>\n" + AFTER):
            assert scores(reward, completion, "<think>\n") == [1.0], (reward, completion)
    assert scores("format", AFTER, "") == [0.0]
    assert scores("format", AFTER, "", prompt="What is 2 + 3?\n<think>\n") == [1.0]
    assert scores("format", AFTER, "<think>\n", prompt="What is 2 + 3?") == [0.0]


def test_reasoning_that_was_cut_off_is_not_paid():
    for completion in ("2 + 3 is 5", "First I add them. The answer is 5."):
        assert scores("accuracy", completion, "") == [1.0]
        assert scores("accuracy", completion, "<think>\n") == [0.0]


def unseen(tokenizer, *entries, options=None):
    specs, _ = parse_rewards(list(entries))
    rows = Dataset.from_list([{"prompt": [PLAIN]}])
    return [(str(p), nothing) for spec in specs for p, nothing in unseen_layout(spec, rows, tokenizer, options or {})]


@pytest.mark.parametrize("name", chat.NAMES)
def test_the_layouts_of_rewards_are_seen_through_every_template(name):
    assert unseen(chat.tokenizer(name), "format", "tags", "code_format", "think_format_reward", "accuracy") == []


def test_a_function_that_does_not_see_the_opened_tag_is_named():
    from grpo_ext.rewards.library.functions import format as layout

    assert not unseen(chat.tokenizer("qwen3"), layout)
    ((problem, nothing),) = unseen(chat.tokenizer("qwen3_5_think"), layout)
    assert "its own layout scores 0, not 1: the prompt leaves <think> open" in problem
    assert nothing


def test_tags_that_are_special_tokens_are_named():
    made = seeing.tokenizer("llava")
    letters = [*'<>/\\{}`_"ikrwn', "think", "answer"]
    made.add_tokens([AddedToken(letter, normalized=False) for letter in letters])
    made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    found = unseen(made, "format", {"name": "tags"}, {"name": "boxed", "func": "format", "kwargs": {"style": "boxed"}})
    assert [nothing for _, nothing in found] == [True, False]
    assert "the tokenizer drops <think>, </think> from completions as special tokens" in found[0][0]
    assert "scores 0.5, not 1" in found[1][0]


# Rows as they are read.

CALLS = [
    {"type": "function", "function": {"name": "look", "arguments": arguments}}
    for arguments in ({"city": "Rome"}, {"zone": "CET"})
]
HISTORIES = [
    [PLAIN, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": "look", "content": "0"}]
    for call in CALLS
]


@pytest.mark.parametrize("source", ["jsonl", "parquet", "python"])
def test_rows_have_no_keys_that_arrow_filled_in(tmp_path, source):
    rows = [{"prompt": history, "solution": "5"} for history in HISTORIES]
    dataset = Dataset.from_list(rows)
    assert dataset[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "zone": None}
    if source == "python":
        read = as_read(dataset)
    elif source == "parquet":
        dataset.to_parquet(tmp_path / "d.parquet")
        read = prepare(Split(Dataset.from_parquet(str(tmp_path / "d.parquet"))), DataConfig())
    else:
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        read = prepare(Split(Dataset.from_json(str(tmp_path / "d.jsonl"))), DataConfig())
    wanted = [[{"content": "", **message} for message in history] for history in HISTORIES]
    assert read["prompt"][:] == [row["prompt"] for row in read] == wanted
    assert read.select([1])[0]["prompt"] == wanted[1]
    made = chat.tokenizer("qwen3")
    assert '"arguments": {"zone": "CET"}' in made.apply_chat_template(read[1]["prompt"], tokenize=False)


def test_a_stream_has_no_filled_keys_either(tmp_path):
    Dataset.from_list([{"prompt": history} for history in HISTORIES]).to_parquet(tmp_path / "d.parquet")
    stream = Dataset.from_parquet(str(tmp_path / "d.parquet")).to_iterable_dataset()
    read = [row["prompt"][1]["tool_calls"] for row in prepare(Split(stream), DataConfig())]
    assert read == [[call] for call in CALLS]


def encoded(side=20):
    data = io.BytesIO()
    Image.new("RGB", (side, side)).save(data, "PNG")
    return {"bytes": data.getvalue(), "path": None}


BROKEN = {"bytes": encoded()["bytes"][:30], "path": "cat.png"}
MARKED = [{"role": "user", "content": [PICTURED, PICTURED, *TEXT]}]


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ([PLAIN], [encoded(), encoded()], None),
        (MARKED, [encoded(), encoded()], None),
        (MARKED, [encoded()], "Number of images provided (1) does not match number of image placeholders (2)"),
        (MARKED, [encoded()] * 3, "Number of images provided (3)"),
        ([PLAIN], [encoded(), BROKEN], "the image (cat.png) cannot be opened"),
        ([PLAIN], [encoded(90)], "cannot be opened (DecompressionBombError"),
        (
            [{"role": "user", "content": "What is in <image>?"}],
            [encoded()],
            "holds '<image>', which the chat template",
        ),
    ],
)
def test_images_that_do_not_fit_are_named_by_their_row(monkeypatch, prompt, images, words):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    data = as_read(with_opened_images(Dataset.from_list([{"prompt": prompt, "images": images}]), "the data"))
    problems, notes = PromptCheck(seeing.tokenizer("llava"), {})(data, "the data")
    assert not notes
    assert len(problems) == (words is not None)
    assert all("the data, row 0 (from 0)" in str(p) and words in str(p) for p in problems), problems
    if words and "<image>" not in words:
        with pytest.raises(DataError, match=r"the row with the prompt .*'role': 'user'"):
            data[0]
    elif not words:
        assert [one.size for one in data[0]["images"]] == [(20, 20)] * 2


def test_a_prompt_on_which_the_processor_fails_is_shown():
    def stock(prompt, row):
        raise StopIteration

    prompt = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (2000, 3))}, *TEXT]}]
    with pytest.raises(DataError, match=r"the processor fails on .*image 2000x3.*What is it.* \(StopIteration: \)"):
        each_alone(stock, [prompt])


# Through recipes and the trainer.


def recipe(folder, rows, **changes):
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = tiny.TRAINING | {
        "model_name_or_path": tiny.save(folder / "model"),
        "dataset_name": str(folder / "train.jsonl"),
        "reward_funcs": ["accuracy"],
        "output_dir": str(folder / "out"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values | changes))
    return ["--config", str(folder / "recipe.yaml")]


ANSWERED = [{"messages": [PLAIN, SAID], "solution": "5"}] * 8


def test_check_finds_the_answer_in_messages_of_training_and_evaluation(tmp_path):
    (tmp_path / "e.jsonl").write_text(json.dumps({"prompt": [PLAIN, SAID], "solution": "5"}))
    argv = recipe(tmp_path, ANSWERED, prompt_column="messages")
    with pytest.raises(
        ConfigError, match=r"training data, row 0 .*ends with the assistant's turn .*in 8 of the first 8"
    ):
        load_recipe(argv, Preflight())
    sets = [{"name": "held", "dataset_name": str(tmp_path / "e.jsonl")}]
    argv = recipe(tmp_path, [{"prompt": [PLAIN], "solution": "5"}] * 8, eval_sets=sets)
    with pytest.raises(ConfigError, match=r"eval_sets: held, row 0 .*ends with the assistant's turn"):
        load_recipe(argv, Preflight())


def test_check_measures_prompts_with_the_options_of_the_template(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% if wide %}wide{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    argv = recipe(tmp_path, [{"prompt": [PLAIN], "solution": "5"}] * 8, chat_template=str(tmp_path / "t.jinja"))
    lengths = []
    for options in ({}, {"wide": True}):
        preflight = Preflight()
        load_recipe([*argv, "--chat_template_kwargs", json.dumps(options)], preflight)
        lengths.append(preflight.longest_prompt)
    assert lengths == [len(PLAIN["content"]), len(PLAIN["content"]) + 4]


def test_options_of_a_template_by_row_are_not_read(tmp_path):
    preflight = Preflight()
    load_recipe(
        recipe(tmp_path, [{"prompt": [PLAIN], "solution": "5", "chat_template_kwargs": {"a": 1}}] * 8), preflight
    )
    assert [note for note in preflight.notes if "column 'chat_template_kwargs': GRPO in TRL does not read it" in note]


def test_a_mixture_is_looked_at_too(tmp_path):
    rendered = [{"prompt": [{"role": "user", "content": f"{PLAIN['content']}<eos>"}]}] * 8
    argv = recipe(
        tmp_path,
        [{**row, "solution": "5"} for row in rendered],
        dataset_name=None,
        datasets=[{"path": str(tmp_path / "train.jsonl")}],
        chat_template="{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}",
    )
    with pytest.raises(ConfigError, match="holds '<eos>', which the chat template writes itself"):
        load_recipe(argv, Preflight())


@pytest.mark.parametrize("name", ["quickstart/grpo", "quickstart/guess"])
def test_packaged_recipes_raise_no_alarm(name):
    preflight, problems = Preflight(), []
    try:
        load_recipe(["--config", name], preflight)
    except ConfigError as error:  # this machine lacks what some of them need
        problems = error.problems
    said = [*preflight.notes, *map(str, problems)]
    assert not [line for line in said if "(from 0)" in line or "layout" in line or "hat template" in line]


def test_both_doors_find_the_same_before_weights_are_loaded(tmp_path):
    rows = [{"prompt": [PLAIN, SAID], "max_length": 3}] * 8
    rewards = ["accuracy", {"name": "soft_overlong", "kwargs": {"max_length": 8, "buffer": 4}}]
    argv = recipe(tmp_path, rows, reward_funcs=rewards, chat_template_kwargs={"thinkin": True})
    with pytest.raises(ConfigError) as by_recipe:
        load_recipe(argv, Preflight())
    (tmp_path / "model" / "model.safetensors").unlink()
    args = GRPOExtConfig(str(tmp_path), **tiny.TRAINING, chat_template_kwargs={"thinkin": True})
    with pytest.raises(ConfigError) as by_python:
        GRPOExtTrainer(str(tmp_path / "model"), rewards, args, rows, reward_workers=0)
    reasons = [sorted(problem.reason for problem in error.value.problems) for error in (by_recipe, by_python)]
    assert reasons[0] == reasons[1]
    assert len(reasons[0]) == 3


def test_the_trainer_checks_datasets_given_in_python(tmp_path):
    def trainer(rows):
        args = GRPOExtConfig(str(tmp_path), **tiny.TRAINING)
        return GRPOExtTrainer(
            tiny.model(), ["accuracy"], args, rows, processing_class=tiny.tokenizer(), reward_workers=0
        )

    with pytest.raises(ConfigError, match=r"train_dataset, row 0 .*ends with the assistant's turn"):
        trainer([{"prompt": [PLAIN, SAID], "solution": "5"}] * 8)
    made = trainer([{"prompt": history, "solution": "5"} for history in [[PLAIN], [{**PLAIN, "name": "ann"}]] * 4])
    assert made.train_dataset[0]["prompt"] == [PLAIN]
    assert made.opened == made.reward_runtime.opened == ""
