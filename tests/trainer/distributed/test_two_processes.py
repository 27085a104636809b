"""Two real accelerate processes: the same gradient as one process with the same global batch."""

from pathlib import Path

import pytest
import torch

from distributed.ranks import PICTURES
from support import tiny
from support.mismatched import ROWS, RULES
from support.processes import CONFIG, launcher, on_cpu, run, run_forked

SCRIPT = Path(__file__).parent / "ranks.py"
pytestmark = pytest.mark.slow
LOSSES = ["grpo", "beta_bnpo", "dapo", "reinforce_pp", "reinforce_pp_baseline"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    model = tiny.save(folder / "model")
    one, two = folder / "one", folder / "two"
    run_forked(SCRIPT, "one_step", model, one, 16, *LOSSES)
    run([*launcher(), str(SCRIPT), "one_step", model, str(two), "8", *LOSSES])  # each with hash seeds of its own
    return {name: [torch.load(side / f"{name}.pt") for side in (one, two)] for name in LOSSES} | {"start": model}


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_make_the_same_step_as_one(name, results):
    """Groups of 8 over devices of 8 rows in one run, and over both devices' 16 rows in the other."""
    one, two = results[name]
    start = torch.cat([p.detach().flatten() for p in tiny.load(results["start"]).parameters()])
    moved = (one["weights"] - start).abs().max().item()
    assert moved > 1e-4
    torch.testing.assert_close(two["weights"], one["weights"], rtol=0, atol=1e-9 * max(1.0, moved))
    for mine, theirs in zip(one["log"], two["log"], strict=True):
        for key in ("loss", "reward", "kl", "entropy", "advantages/zero_variance_groups", "log_ratio/clamped_frac"):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-6), key


@pytest.mark.parametrize("engine", ["cpu_ddp", "fsdp2"])
def test_two_processes_add_losses_and_show_estimators_what_one_does(engine, tmp_path):
    model, teacher = (tiny.save(tmp_path / name, seed=seed) for name, seed in (("model", 0), ("teacher", 5)))
    found = {}
    for name, config, rows in (("one", None, 16), ("two", on_cpu(engine, tmp_path), 8)):
        run_forked(SCRIPT, "added_losses", model, tmp_path / name, rows, teacher, config=config)
        found[name] = torch.load(tmp_path / name / "step.pt")
    one, two = found["one"], found["two"]
    for name, values in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], values, rtol=0, atol=1e-12)
    assert one["seen"].keys() == two["seen"].keys()
    for name, values in one["seen"].items():
        if name == "columns":
            assert values == two["seen"][name]
        else:
            torch.testing.assert_close(two["seen"][name], values, rtol=0, atol=1e-12, equal_nan=True)


def test_two_processes_train_on_images_as_one_does(tmp_path):
    """One has no image at times."""
    for name, config, rows in (("one", None, 16), ("two", CONFIG, 8)):
        run_forked(SCRIPT, "pictures", "qwen2_5_vl", tmp_path / name, rows, config=config)
    for name in PICTURES:
        one, two = (torch.load(tmp_path / folder / f"{name}.pt") for folder in ("one", "two"))
        assert two["images"] == one["images"]
        torch.testing.assert_close(two["weights"], one["weights"], rtol=0, atol=1e-12)
        for mine, theirs in zip(one["log"], two["log"], strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-9)
            assert mine["grad_norm"] > 0.1
        assert ("dynamic_sampling/rounds" in two["log"][0]) == ("dynamic_sampling" in PICTURES[name])


def test_two_processes_correct_the_sampler_as_one_does(tmp_path):
    """Weights over their mean and the second moment's cut are of the generation of both processes."""
    model, found = tiny.save(tmp_path / "model"), {}
    for name, config, rows in (("one", None, ROWS), ("two", CONFIG, ROWS // 2)):
        run_forked(SCRIPT, "sampler_correction", model, tmp_path / name, rows, config=config)
        found[name] = {rule: torch.load(tmp_path / name / f"{rule}.pt") for rule in RULES}
    for rule in RULES:
        one, two = found["one"][rule], found["two"][rule]
        for name in ("ratios", "weights"):
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-12)
        assert two["log"] == pytest.approx(one["log"], rel=1e-12, abs=1e-12)
        assert one["ratios"].unique().numel() > 1
