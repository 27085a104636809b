"""`grpo-ext report`: content of the page, notes about unreadable files, and hostile completions."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from grpo_ext.report import reading
from grpo_ext.report.completions import CLIPS, clipped
from grpo_ext.report.curves import COLOURS, Curve, banded, pictures, ticks
from grpo_ext.report.facts import without_paths
from grpo_ext.report.page import MAX_SIZE, write_report
from grpo_ext.report.reading import MAX_RUNS, read_runs
from grpo_ext.report.seeds import Band, grouped
from support.commands import command
from support.run_folders import HOSTILE, RECORD, logged, run_folder, with_completions, with_evaluation


class Page(HTMLParser):
    """Elements and text of a page; scripts are kept apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.size = len(text.encode())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self) -> dict:
        names = [attributes.get("id") for tag, attributes in self.elements if tag == "script"]
        return json.loads(self.scripts[names.index("completions-data")])


def page_of(tmp_path, *runs) -> Page:
    return Page(write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8"))


def test_the_page_of_a_run_shows_facts_curves_evaluations_and_completions(tmp_path):
    run = with_completions(
        run_folder(tmp_path / "mine"), 3, [("1+1=", ["2", "3"]), ("2+2=", ["5", "4"])], solution="2"
    )
    with_evaluation(with_evaluation(run, 0, 0.25), 20, 0.75)
    page = page_of(tmp_path, run)
    facts = ("dapo", "where a < b", "arXiv:2503.14476", "accuracy x 1; format x 0.5", "quickstart/addition, 7979 rows")
    for words in (*facts, "4 of 20, finished", "2 processes", "trl 1.16.0", "\u2026/tiny"):
        assert words in page.text
    assert "/data/someone" not in page.text
    assert "avg@4 0.25 (0.15 to 0.35) 0.75 (0.65 to 0.85)" in page.text
    assert sum(tag == "svg" for tag, _ in page.elements) == 2  # kl is constant
    labels = [a["aria-label"] for _, a in page.elements if a.get("role") == "img"]
    assert "reward: 0.1 at step 1, 0.4 at step 4" in labels
    rows = page.data["rows"]
    assert [(page.data["prompts"][r["prompt"]], r["completion"], r["reward"]) for r in rows] == [
        ("1+1=", "2", 0.5),
        ("1+1=", "3", 1.0),
        ("2+2=", "5", 0.5),
        ("2+2=", "4", 1.0),
    ]
    assert rows[1]["parts"] == {"accuracy": 1.0, "format": 0.0}
    assert rows[1]["extras"] == {"solution": "2"}
    assert "What is missing here" not in page.text


def test_branches_of_an_agent_are_shown_below_its_completion(tmp_path):
    run = with_completions(run_folder(tmp_path / "mine"), 1, [("p", ["c"])], branches="--- branch 1 ---\n\n[user]\ngo")
    [row] = page_of(tmp_path, run).data["rows"]
    assert row["completion"] == "c\n\n--- branch 1 ---\n\n[user]\ngo"
    assert row["extras"] == {}


def test_the_page_loads_no_file_and_runs_only_its_script(tmp_path):
    page = page_of(tmp_path, with_completions(run_folder(tmp_path / "mine"), 1, [("p", ["c"])]))
    [policy] = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'")
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed"), tag
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert (attributes.get("href") or attributes.get("xlink:href") or "#").startswith("#")


def test_hostile_completions_names_and_values_are_escaped(tmp_path):
    bad = "<script>alert(1)</script>$\\frac{"
    log = [{bad: 1.0, "reward": 10**400, "kl": float("nan"), "step": 1}, {bad: 2.0, "reward": 1, "step": 2}]
    run = run_folder(tmp_path / "mine", log=log, **{"dataset_name": bad})
    with_completions(run, 1, [(text, [text]) for text in HOSTILE], solution="</script>")
    with_evaluation(run, 1, 0.5, set=bad)
    page = page_of(tmp_path, run)
    assert len(page.scripts) == 3
    shown = {page.data["prompts"][row["prompt"]]: row for row in page.data["rows"]}
    assert len(shown) == len(HOSTILE)
    for text in HOSTILE:
        assert shown[clipped(text, CLIPS[0])]["length"] == len(text)
    everything = "".join(page.texts) + json.dumps(page.data, ensure_ascii=False)
    assert not re.search("[\x00-\x08\u202e]", everything)
    assert "NUL \u2400 and bell \u2407" in everything
    assert page.size < MAX_SIZE
    assert "\ud800" not in clipped("a lone \ud800 surrogate", 100)


def test_several_runs_share_curves_and_have_a_table_of_differences(tmp_path):
    runs = [
        run_folder(tmp_path / "here" / "run", learning_rate=1e-5, logging_steps=1),
        run_folder(tmp_path / "there" / "run", learning_rate=2e-5, logging_steps=9, log=logged(9)),
    ]
    page = page_of(tmp_path, *runs)
    assert "Settings that differ setting here/run there/run learning_rate 1e-05 2e-05 " in page.text
    assert sum(tag == "svg" for tag, _ in page.elements) == 2
    pictured = re.findall(r"<svg.*?</svg>", (tmp_path / "report.html").read_text(), re.DOTALL)
    assert all(colour in picture for picture in pictured for colour in COLOURS[:2])


def line(steps, values) -> Band:
    return Band(steps, values, values, values)


def leave(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(text)


ROW = json.dumps({"reward": 1.0, "step": 1}) + "\n"
LEFT_OUT = {
    "a half-written last line": ({"metrics.jsonl": ROW + '{"reward": 1.'}, "metrics.jsonl: line 2 left out"),
    "rows of another format": ({"metrics.jsonl": ROW + "7\n[]\nreward,step\n"}, "3 lines, the first of them line 2,"),
    "a broken line after an empty one": ({"metrics.jsonl": ROW + "\n7\n"}, "line 3 left out"),
    "a step that is not a number": ({"metrics.jsonl": ROW + '{"reward": 9, "step": true}\n'}, "line 2 left out"),
    "nothing on record": ({"metrics.jsonl": ROW}, "No record of the settings yet"),
    "a broken record": ({"metrics.jsonl": ROW, "finished.json": "{"}, "finished.json cannot be read"),
    "a record of another kind": ({"metrics.jsonl": ROW, "finished.json": "[]"}, "holds a list where an object"),
    "no parquet": (
        {"metrics.jsonl": ROW, "completions/completions_00001.parquet": "x"},
        "not a complete parquet file",
    ),
    "an evaluation without figures": ({"metrics.jsonl": ROW, "evaluation/a/b.json": "{}"}, "holds no figures"),
    "deep nesting": ({"metrics.jsonl": ROW + "[" * 100_000}, "line 2 left out"),
    "text where numbers were": ({"metrics.jsonl": ROW + '{"reward": "x", "step": 2}\n'}, "1 at step 1, 1 at step 1"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_unreadable_files_are_left_out_with_a_note(tmp_path, case):
    files, words = LEFT_OUT[case]
    for name, text in files.items():
        leave(tmp_path / "mine", name, text)
    page = page_of(tmp_path, tmp_path / "mine")
    assert words in page.text + str(page.elements)


def test_a_report_without_content_is_refused(tmp_path, capsys):
    empty, run = tmp_path / "empty", run_folder(tmp_path / "mine")
    leave(empty, "metrics.jsonl", '{"reward"')
    cases = {
        "no such folder": [tmp_path / "none"],
        "not a folder": [run / "metrics.jsonl"],
        "no content to report": [run, empty],
        "half written": [empty],
        "named twice": [run, tmp_path / "empty" / ".." / "mine"],
        f"Name at most {MAX_RUNS}": [run] * (MAX_RUNS + 1),
        "Let its name end in .html": [run, "--output", tmp_path / "page.pdf"],
    }
    for words, arguments in cases.items():
        assert command("report", *arguments) == 2
        assert words in capsys.readouterr().err
    assert command("report", run) == 0
    assert (run / "report.html").is_file()


def seeded(tmp_path, loss: str, seed: int, scale: float, **changed):
    log = [{"reward": scale * step + seed, "kl": 0.1 * step, "step": step} for step in range(1, 8)]
    settings = {"loss_type": loss, "objective.loss_type": loss, "seed": seed, "output_dir": f"{loss}-{seed}"}
    run = run_folder(tmp_path / f"{loss}-{seed}", log=log, **settings | changed)
    return with_evaluation(with_evaluation(run, 0, 0.25), 20, 0.5 + 0.125 * seed)


def test_runs_that_differ_only_in_their_seed_are_one_curve_with_an_interval(tmp_path):
    runs = [seeded(tmp_path, "dapo", seed, 1.0) for seed in (0, 1, 3)]
    runs += [seeded(tmp_path, "gspo", seed, 2.0) for seed in (0, 1)]
    page = page_of(tmp_path, *runs)
    table = page.text.partition("Over seeds")[2].partition("Means over runs")[0]
    assert "dapo 3 held_out avg@4 0.25 (0.25 to 0.25) 0.6667 (0.192 to 1.14) +0.4167 (-0.0577 to +0.891)" in table
    assert "gspo 2 held_out avg@4 0.25 (0.25 to 0.25) 0.5625 (" in table
    [curve] = [a["aria-label"] for _, a in page.elements if a.get("role") == "img" and a["data-curve"] == "reward"]
    assert curve == "dapo: 2.333 at step 1, 8.333 at step 7; gspo: 2.5 at step 1, 14.5 at step 7"
    picture = re.findall(r"<svg.*?</svg>", (tmp_path / "report.html").read_text(), re.DOTALL)[0]
    assert (picture.count("<polyline"), picture.count("<polygon")) == (2, 2)


def test_equal_seeds_other_settings_and_unknown_ones_are_not_samples_of_one_mean(tmp_path):
    same = [run_folder(tmp_path / f"same{i}", seed=0) for i in range(2)]
    other = [run_folder(tmp_path / f"other{i}", seed=i, learning_rate=1e-6 * i) for i in (1, 2)]
    unknown = [run_folder(tmp_path / f"unknown{i}") for i in range(2)]
    for folder in unknown:
        (folder / "finished.json").unlink()
    found = grouped(read_runs([*same, *other, *unknown]))
    assert [(group.name, len(group.runs)) for group in found] == [
        (folder.name, 1) for folder in (*same, *other, *unknown)
    ]


def test_a_mean_over_seeds_ends_where_a_run_ends_and_has_a_gap_where_one_is_not_finite(tmp_path):
    logs = [[{"reward": 1.0 * step, "step": step} for step in range(1, last)] for last in (8, 5)]
    logs[0][1]["reward"] = math.nan
    [group] = grouped(read_runs([run_folder(tmp_path / str(i), seed=i, log=log) for i, log in enumerate(logs)]))
    assert group.name == "0 and 1 more"
    band = group.series()["reward"]
    assert band.steps == [1, 2, 3, 4]
    assert [math.isnan(value) for value in band.mean] == [False, True, False, False]
    svg = pictures([Curve("Rewards", "reward", {0: band})], ["both"])["reward"].svg
    assert (svg.count("<polyline"), svg.count("<circle")) == (2, 3)
    assert "nan" not in svg


def test_a_picture_places_its_points_and_round_numbers():
    svg = pictures([Curve("Policy", "kl", {0: line([0.0, 4.0, 8.0], [0.0, 0.5, 1.0])})], ["run"])["kl"].svg
    assert 'points="47.5,147.4 175.8,77.0 304.1,6.6"' in svg
    assert ticks(0.0, 1.0, most=8) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(3.0, 4.0, most=5, least=1.0) == [3.0, 4.0]


def test_a_long_curve_becomes_means_with_quantiles():
    steps, values = list(range(10_000)), [float(i % 100) for i in range(10_000)]
    values[5000:6000] = [math.nan] * 1000
    band = banded(line(steps, values), 100)
    assert band.steps == list(range(0, 10_000, 100))
    assert band.mean[:50] == [49.5] * 50
    assert (band.low[0], band.high[0]) == (9.0, 90.0)
    assert all(math.isnan(v) for v in band.mean[50:60])
    assert not math.isnan(band.mean[60])
    assert banded(line([1, 2], [3.0, 4.0]), 2) == line([1, 2], [3.0, 4.0])
    over_seeds = Band([1, 2], [3.0, 4.0], [2.0, 3.5], [4.0, 4.5])
    assert banded(over_seeds, 1) == Band([1], [3.5], [2.75], [4.25])


HELD_OUT = {
    "Yes: held_out avg@4 rose from 0.25 (0.15 to 0.35) at step 0 to 0.75 (0.65 to 0.85) at step 20.": (0.25, 0.75),
    "Not shown: held_out avg@4 rose from 0.25 (0.15 to 0.35) at step 0 to 0.3 (0.2 to 0.4) at step 20.": (0.25, 0.3),
    "No, it got worse: held_out avg@4 fell from 0.75 (0.65 to 0.85) at step 0 to 0.25": (0.75, 0.25),
}


@pytest.mark.parametrize("words", HELD_OUT)
def test_the_page_begins_with_the_verdict(words, tmp_path):
    before, after = HELD_OUT[words]
    log = [{"reward": 0.5, "step_time": 500.0, "step": 10}, {"step_time": 220.0, "num_tokens": 1_234_567, "step": 20}]
    run = run_folder(tmp_path / "mine", log=log)
    page = page_of(tmp_path, with_evaluation(with_evaluation(run, 0, before), 20, after))
    opening = page.text.partition("What was run ")[2].partition("What was run ")[0]
    assert words in opening
    assert "warnings of the diagnosis none" in opening
    assert "time 2.00 hours tokens 1,234,567" in opening


def evaluated(run, name, model, right, **changed):
    """What `grpo-ext eval --model` leaves: no step, the share of right samples by prompt."""
    mean = sum(right) / len(right)
    figures = {"avg@4": {"mean": mean, "low": mean - 0.2, "high": mean + 0.2, "prompts": len(right)}}
    share = {"accuracy": dict(enumerate(right))}
    content = {"set": "test", "model": model, "step": None, "figures": figures, "settings": {"samples": 4}}
    leave(run, f"evaluation/test/{name}.json", json.dumps(content | {"right": share} | changed))


GAINS = [
    ([0.25, 0.5, 0.0, 0.25], [0.5, 1.0, 0.25, 0.5], "Yes"),
    ([0.5, 0.5, 0.25, 0.5], [0.5, 0.25, 0.5, 0.5], "Not shown"),
]


@pytest.mark.parametrize(("before", "after", "verdict"), GAINS)
@pytest.mark.parametrize("model", ["outputs/mine", "outputs/mine/checkpoint-20"])
def test_results_of_eval_for_the_model_before_and_after_lead_the_page(before, after, verdict, model, tmp_path):
    run = run_folder(tmp_path / "mine", steps=20, model_name_or_path="org/base")
    evaluated(run, "base", "org/base", before)
    evaluated(run, "mine", model, after)
    evaluated(run, "other", "org/another", [1.0] * 4)
    page = page_of(tmp_path, run)
    gained = sum(b - a for a, b in zip(before, after, strict=True)) / 4
    assert f"{verdict}: test avg@4" in page.text
    assert f"at step 20, by prompt {gained:+.3g} (" in page.text
    assert "over 4 prompts." in page.text


def test_a_reward_that_rises_alone_is_named(tmp_path):
    log = logged(20)
    for after, named in ((0.3, True), (0.75, False)):
        run = run_folder(tmp_path / f"to_{after}", log=log)
        page = page_of(tmp_path, with_evaluation(with_evaluation(run, 0, 0.25), 20, after))
        assert ("Yet the reward in training rose from" in page.text) == named


def test_results_under_other_settings_are_not_paired(tmp_path):
    run = run_folder(tmp_path / "mine", steps=20, model_name_or_path="org/base")
    evaluated(run, "base", "org/base", [0.25] * 4)
    evaluated(run, "mine", "mine", [0.5] * 4, settings={"samples": 8})
    assert "by prompt" not in page_of(tmp_path, run).text


def test_few_logs_show_no_rise_and_a_rise_within_the_noise_is_named(tmp_path):
    few = [{"reward": 1.5 + 0.01 * step, "step": step} for step in range(1, 6)]
    assert "fewer than 6 logs of the reward" in page_of(tmp_path, run_folder(tmp_path / "few", log=few)).text
    noisy = [{"reward": 1.0 + step % 2 + 0.01 * step, "step": step} for step in range(12)]
    assert "which may be noise." in page_of(tmp_path, run_folder(tmp_path / "noisy", log=noisy)).text


def test_without_held_out_results_the_verdict_is_unknown(tmp_path):
    page = page_of(tmp_path, run_folder(tmp_path / "mine", steps=40))
    assert "Unknown on held-out prompts: none were evaluated (eval_sets, eval_strategy)." in page.text
    assert (
        "reward in training rose from 0.25 (0.121 to 0.379) at step 1 to 3.85 (3.72 to 3.98) at step 40." in page.text
    )
    log = [{"reward": 0.1, "eval_reward": 0.1 * s, "step": s} for s in (1, 2)]
    page = page_of(tmp_path, run_folder(tmp_path / "other", log=log))
    assert "eval_reward rose from 0.1 at step 1 to 0.2 at step 2. One figure without an interval" in page.text


def test_one_evaluation_is_no_change_but_was_made(tmp_path):
    run = run_folder(tmp_path / "mine", steps=20, model_name_or_path="org/base")
    evaluated(run, "base", "org/base", [0.25] * 4)
    assert "Unknown on held-out prompts: they were evaluated only once. The reward" in page_of(tmp_path, run).text


def test_labels_of_small_values_keep_their_digits(tmp_path):
    values = {"kl": [0.00012, 0.00034], "learning_rate": [1e-6, 2e-6]}
    drawn = [Curve("Policy", name, {0: line([1.0, 2.0], given)}) for name, given in values.items()]
    shown = pictures(drawn, ["run"])
    assert ">0.00025<" in shown["kl"].svg
    assert "1e-06" in shown["learning_rate"].svg  # 0.0000010 would be cut off


def test_constant_and_equal_curves_are_named_and_not_drawn(tmp_path):
    log = [
        {
            "reward": 0.1 * s,
            "rewards/a/mean": 0.1 * s,
            "kl": 0.0,
            "entropy": 1 + 1e-9 * s,
            "loss": 1 - 2e-5 * s,
            "step": s,
        }
        for s in range(1, 9)
    ]
    page = page_of(tmp_path, run_folder(tmp_path / "mine", log=log))
    assert "kl (0), entropy (1)" in page.text.partition("Not drawn")[2]
    assert "rewards/a/mean (as reward)" in page.text
    assert sum(tag == "svg" for tag, _ in page.elements) == 2


def test_labels_of_an_axis_differ():
    growing = ((1.0, 1e-8), (1.0, 1e-6), (0.9999, 1e-7), (123.4, 1e-8), (1e-7, 1e-8), (0.0, 1.0), (1e299, 1e-3))
    for least, growth in growing:
        given = [least * (1 + growth * n) for n in range(200)]
        drawn = Curve("Policy", "kl", {0: line([float(n) for n in range(200)], given)})
        labels = re.findall(r'"end">([^<]*)</text>', pictures([drawn], ["run"])["kl"].svg)
        assert len(labels) == len(set(labels)) > 2, labels


def test_only_the_last_part_of_a_path_of_the_machine_is_shown():
    given = "/Users/me/data/a.csv ~/b/c.csv ./data/d.csv ../e/f.csv org/name"
    assert without_paths(given) == "\u2026/a.csv \u2026/c.csv ./data/d.csv ../e/f.csv org/name"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "length"), [(24, 40), (8, 30_000)])
def test_the_page_of_a_long_run_stays_small(tmp_path, rows, length):
    run = run_folder(tmp_path / "mine", steps=2000)
    texts = [f"{n} " + "\u6f22" * length for n in range(rows)]
    for step in range(60):
        with_completions(run, step, [(f"{step} a", texts[: rows // 2]), (f"{step} b", texts[rows // 2 :])])
    page = page_of(tmp_path, run)
    assert page.size < MAX_SIZE
    assert f"of {60 * rows:,} completions, of 40 of 60 recorded steps" in page.text
    steps = {row["step"] for row in page.data["rows"]}
    assert {0, 59} <= steps
    assert len(steps) == 40


def test_reward_weights_come_from_the_record(tmp_path):
    [run] = read_runs([run_folder(tmp_path / "mine", log=[{"rewards/other/mean": 1.0, "step": 1}])])
    assert run.rewards == {"other": None, "accuracy": 1.0, "format": 0.5}
    assert run.record["learning_rate"] == RECORD["learning_rate"]


def test_a_log_without_end_is_read_to_a_bound(tmp_path, monkeypatch):
    row = json.dumps({"step": 1, "loss": 0.5}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(row * 10)
    monkeypatch.setattr(reading, "_LARGEST_LOG", 3 * len(row) + 2)
    [run] = read_runs([tmp_path])
    assert len(run.log) == 3
    assert any("only its first" in note for note in run.notes)
    assert not any("left out" in note for note in run.notes)
