"""`grpo-ext diagnose`: output and exit codes, and the warnings during training."""

import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.report.page import write_report
from grpo_ext.trainer.diagnosis import rules
from grpo_ext.trainer.diagnosis.recording import Watching
from support import tiny
from support.commands import command
from support.histories import history
from support.run_folders import run_folder

STALE = {"sampling/mismatch": lambda n: 2e-3 * n}
MASK = {"completions/mask_misplaced": 0.8}


def asked(*argv, capsys) -> tuple[int, str, str]:
    code = command("diagnose", *argv)
    return code, *capsys.readouterr()


def test_a_finding_has_step_evidence_and_cure(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", log=history(STALE))
    code, out, _ = asked(folder, capsys=capsys)
    assert code == 1
    assert out.startswith("step 15: stale sampler\n")
    for words in ("sampling/mismatch 0.002 to 0.01 nats per token in 5 logs, 4e-08 to 6e-08 before", "cure Look at"):
        assert words in " ".join(out.split())


OF_ENVIRONMENTS = ["environment fails", "agent fails"]


def test_a_sound_run_has_no_findings(tmp_path, capsys):
    code, out, _ = asked(run_folder(tmp_path / "run", log=history()), capsys=capsys)
    assert code == 0
    assert out.startswith("No problem found in 20 logs, up to step 20. Checked:\n")
    looked_at, _, unseen = out.partition("Not checked")
    for rule in rules.RULES:
        assert rule.name in (unseen if rule.name in OF_ENVIRONMENTS else looked_at)
        assert all(figure in out for figure in rule.figures)


SILENT = {
    "advantages/zero_variance_groups": 1.0, "reward": 0.0, "groups/all_wrong": 1.0, "completions/clipped_ratio": 0.94
}  # fmt: skip


@pytest.mark.parametrize(("steps", "step"), [(1, 1), (4, 4), (9, 5)])
def test_a_run_whose_groups_never_have_an_advantage_is_named(steps, step, tmp_path, capsys):
    code, out, _ = asked(run_folder(tmp_path / "run", log=history(SILENT, since=1, steps=steps)), capsys=capsys)
    assert (code, f"step {step}: no signal" in out) == (1, True)
    for words in (f"in all {step} logs", "reward 0,", "groups/all_wrong 1,", "completions/clipped_ratio 0.94"):
        assert words in " ".join(out.split())


def test_json_output(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", log=history(STALE | MASK))
    code, out, _ = asked(folder, "--json", capsys=capsys)
    answer = json.loads(out)
    assert (code, answer["logs"], list(answer["unseen"])) == (1, 20, OF_ENVIRONMENTS)
    assert len(answer["looked_at"]) == len(rules.RULES) - 2
    assert [(f["fault"], f["step"]) for f in answer["findings"]] == [("misplaced mask", 12), ("stale sampler", 15)]
    assert all(f["evidence"] and f["is"] and f["cure"] for f in answer["findings"])


def test_rules_without_their_metrics_are_listed(tmp_path, capsys):
    code, out, _ = asked(run_folder(tmp_path / "run", steps=9), capsys=capsys)
    assert code == 0
    _, _, unseen = out.partition("Not checked, because these metrics were not logged:\n")
    assert {"another prompt", "advantages of other rows", "misplaced mask"} <= set(
        re.findall(r"  (\S[^/]*?)  ", unseen)
    )


def test_a_half_written_line_is_left_out_with_a_note(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", log=history(STALE))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"reward": 0.1, "ste')
    code, out, _ = asked(folder, capsys=capsys)
    assert code == 1
    assert "Note: metrics.jsonl: line 21 left out (half written, or not a JSON object with a step)." in out
    assert "step 15: stale sampler" in out


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (None, "no such folder. Name the output_dir of a run."),
        ([], "no log in metrics.jsonl"),
        ([{"eval_reward": 0.1, "step": 3}], "no log of a training step was found"),
    ],
)
def test_a_folder_without_a_log_is_refused(log, words, tmp_path, capsys):
    folder = tmp_path / "run"
    if log is not None:
        run_folder(folder, log=log)
    code, out, error = asked(folder, capsys=capsys)
    assert (code, out) == (2, "")
    assert words in error


def test_the_report_has_the_findings(tmp_path):
    runs = [run_folder(tmp_path / name, log=history(changes)) for name, changes in (("a", MASK), ("b", {}))]
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert "Likely problems" in page
    assert "a, step 12" in page
    assert "b, step" not in page
    assert "Likely problems" not in write_report(runs[1:], tmp_path / "page.html").read_text()


class MaskOffByOne(GRPOExtTrainer):
    """The last token of a completion never trains, from the fourth step on."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.state.global_step >= 3:
            output["completion_mask"] = torch.nn.functional.pad(output["completion_mask"][:, 1:], (0, 1))
        return output


@pytest.mark.parametrize(("trainer", "named"), [(MaskOffByOne, ["misplaced mask"]), (GRPOExtTrainer, [])])
def test_training_warns_once_about_each_finding(trainer, named, tmp_path, caplog, capsys):
    args = GRPOExtConfig(output_dir=str(tmp_path), **(tiny.TRAINING | {"max_steps": 8}))
    training = trainer(tiny.model(), tiny.count_a, args, tiny.prompts(64), processing_class=tiny.tokenizer())
    with caplog.at_level(logging.WARNING):
        training.train()
    warned = [r.getMessage() for r in caplog.records if r.name == "grpo_ext.trainer.diagnosis.recording"]
    assert [text.partition(". ")[0] for text in warned] == [f"step 5: {name}" for name in named]
    capsys.readouterr()
    code, out, _ = asked(tmp_path, "--json", capsys=capsys)
    assert (code, [f["fault"] for f in json.loads(out)["findings"]]) == (len(named), named)


def test_a_rule_that_raises_does_not_end_a_run(caplog, monkeypatch):
    def fails(history):
        raise ZeroDivisionError

    monkeypatch.setattr(rules, "RULES", (replace(rules.RULES[0], shown_by=fails), *rules.RULES[1:]))
    watching, state = Watching({}), SimpleNamespace(is_world_process_zero=True, log_history=history())
    with caplog.at_level(logging.WARNING):
        watching.on_log(None, state, None)
        watching.on_log(None, state, None)
    (record,) = caplog.records
    assert "the diagnosis failed" in record.getMessage()
