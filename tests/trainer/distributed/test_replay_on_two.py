"""Two processes record; one computes a step of both again."""

import json
from pathlib import Path

import pytest

from grpo_ext.commands import replay
from grpo_ext.packing.kept import KEPT
from grpo_ext.trainer.recording import whole
from support import tiny
from support.processes import needs_deepspeed, on_cpu, run_forked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("launch", "truncated"), [("ddp", False), ("fsdp2", True), ("zero3", True)], ids=str)
def test_two_processes_record_and_one_computes_it_again(launch, truncated, tmp_path):
    """Also what a truncated sampler has drawn, over the tokens that it kept."""
    needs_deepspeed(launch)
    model, config = tiny.save(tmp_path / "model"), on_cpu(launch, tmp_path)
    script = [str(Path(__file__).parent / "ranks.py"), "replay", model, str(tmp_path), *["truncated"] * truncated]
    run_forked(*script, config=config)
    for step, logged in enumerate(json.loads((tmp_path / "log.json").read_text()), 1):
        folder = tmp_path / "run" / "batches" / f"step_{step}"
        contents = whole(folder)
        assert [content["rank"] for content in contents] == [0, 1]
        computed = replay.compute(contents, replay.recorded_weights(folder, contents[0]), {})
        assert computed.loss == pytest.approx(logged["loss"], rel=1e-5, abs=1e-7)
        assert computed.grad_norm == pytest.approx(logged["grad_norm"], rel=1e-5)
        assert computed.figures["kl"] == pytest.approx(logged["kl"], rel=1e-5, abs=1e-8)
        assert all((KEPT in batch) == truncated for content in contents for batch in content["micro_batches"])
