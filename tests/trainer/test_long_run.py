"""Three hundred steps (STEPS=2000 for more) take what fifty take: memory, open files, threads, time."""

import gc
import os
import statistics
import threading
import time
from pathlib import Path

import psutil
import pytest
from transformers import TrainerCallback

from support import tiny
from support.trainers import build, scripted_rollout

pytestmark = pytest.mark.slow
STEPS, WARM, EVERY = int(os.environ.get("STEPS", "300")), 50, 25


class Watch(TrainerCallback):
    """Resident memory, descriptors, threads and time at every 25th step."""

    def __init__(self):
        self.samples, self.began = [], time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY == 0:
            gc.collect()
            process, now = psutil.Process(), time.process_time()
            sample = process.memory_info().rss, process.num_fds(), threading.active_count(), now - self.began
            self.samples.append(sample)
            self.began = time.process_time()


def test_nothing_grows(tmp_path):
    watch = Watch()
    settings = {"logging_steps": 10, "save_strategy": "steps", "save_steps": EVERY, "save_total_limit": 1}
    trainer = build(tiny.model(), tmp_path, rollout=scripted_rollout, max_steps=STEPS, **settings)
    trainer.add_callback(watch)
    trainer.train()
    assert len(list(Path(tmp_path).glob("checkpoint-*"))) == 1
    memory, files, threads, seconds = zip(*watch.samples, strict=True)
    warm, late = WARM // EVERY, slice(-5, None)
    figures = f"RSS {[m >> 20 for m in memory[::4]]} MiB, files {files[::4]}, s {[round(s, 2) for s in seconds[::4]]}"
    print(figures)
    assert statistics.median(memory[late]) <= 1.02 * max(memory[warm : warm + 2]), figures
    assert set(files[late]) == {files[warm]}, figures
    assert set(threads[late]) == {threads[warm]}, figures
    assert statistics.median(seconds[late]) <= 2 * statistics.median(seconds[warm : warm + 5]), figures
