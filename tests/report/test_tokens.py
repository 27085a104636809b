"""Tokens with their values in the report, from recorded batches."""

import torch

from grpo_ext.report.completions import browsed, embedded
from grpo_ext.report.reading import read_runs
from grpo_ext.trainer.recording import file_of, texts
from support.recordings import record
from support.run_folders import run_folder, with_completions


def rows(run, room=1_000_000):
    return browsed(read_runs([run]), room)


def test_recorded_values_join_the_rows_of_their_completions(tmp_path):
    run = with_completions(run_folder(tmp_path / "mine"), 3, [("q", ["a b", "b c"]), ("r", ["a b"])])
    record(run, 3, [[4, 5, 6, 5, 7]], [["z", " b", "é", " b", "</s>"]], row=0)
    data = rows(run)
    tokens = [row.get("tokens") for row in data["rows"]]
    assert data["kinds"] == []  # "a b" is not what was recorded there
    assert tokens == [None] * 3
    record(run, 3, [[4, 5, 7], [5, 6, 7]], [["a", " b", "</s>"], [" b", " c", "</s>"]], row=0)
    data = rows(run)
    first, second, third = (row.get("tokens") for row in data["rows"])
    assert data["kinds"] == ["advantage", "ratio", "entropy"]
    assert first == {
        "text": ["a", " b", "</s>"],
        "left": 0,
        "advantage": [0.5, 0.5, None],
        "ratio": [1.0, 2.0, None],
        "entropy": [0.0, 0.1, None],
    }
    assert second["text"] == [" b", " c", "</s>"]
    assert third is None


def test_a_step_with_only_a_recording_has_rows(tmp_path):
    run = with_completions(run_folder(tmp_path / "mine"), 2, [("q", ["x"])])
    record(run, 5, [[4, 5, 7], [5, 6, 7]], [["a", " b", "</s>"], [" b", " c", "</s>"]], row=6)
    data = rows(run)
    assert data["total"] == 3
    assert [(row["step"], row["completion"]) for row in data["rows"]] == [(2, "x"), (5, "a b</s>"), (5, " b c</s>")]
    own = data["rows"][1]
    assert data["prompts"][own["prompt"]] == "Q: "
    assert (own["parts"], own["reward"], own["advantage"]) == ({"accuracy": 1.0, "format": 0.0}, 1.0, 0.5)


def test_tokens_of_one_character_are_one_piece(tmp_path):
    run = run_folder(tmp_path / "mine")
    pieces = {"4": "\ufffd", "5": "\ufffd", "4,5": "\U0001f600", "6": "!", "7": "</s>"}
    record(run, 1, [[4, 5, 6, 7]], pieces=pieces, row=0)
    tokens = rows(run)["rows"][0]["tokens"]
    assert tokens["text"] == ["\U0001f600", "!", "</s>"]
    assert tokens["ratio"] == [1.0, 3.0, None]


def test_texts_of_tokens_join_to_the_text():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "\u2581the", "\u2581cat", "s", "<0xC3>", "<0xA9>"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<unk>")
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    mask = torch.ones_like(ids)
    batch = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask}
    found = texts(fast, [batch])
    assert [found[key] for key in ("1", "2", "3", "4,5")] == [" the", " cat", "s", "\u00e9"]


def test_many_recordings_fit_and_damaged_ones_get_a_note(tmp_path):
    run = run_folder(tmp_path / "mine")
    for step in range(1, 14):
        record(run, step, [[4] * 1000 for _ in range(8)], pieces={"4": "</script><b>", "7": "x"}, row=0)
    file_of(run / "batches", 13, 0).write_text("half")
    found = read_runs([run])
    data = browsed(found, 400_000)
    assert len(embedded(data)) < 450_000
    shown = [row["tokens"] for row in data["rows"] if "tokens" in row]
    assert shown
    assert all(len(tokens["text"]) == 800 and tokens["left"] == 200 for tokens in shown)
    assert any("rank_0.pt" in note and "is damaged" in note for note in found[0].notes)


def test_colours_need_recordings(tmp_path):
    from grpo_ext.report.page import html

    run = with_completions(run_folder(tmp_path / "mine"), 2, [("q", ["x"])])
    page = html(read_runs([run]))
    assert '<select name="colour">' not in page
    record(run, 2, [[4]], [["x"]], row=0)
    assert '<select name="colour">' in html(read_runs([run]))
