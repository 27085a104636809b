"""Games, turns and evaluation sets are the same on one process and four."""

import json
from pathlib import Path

import pytest
import torch

from support import tiny
from support.dealt import LIMITS, SAMPLES
from support.processes import on_cpu, run_forked

pytestmark = pytest.mark.slow
WORLDS = 1, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("games")
    model = tiny.save(folder / "model", initializer_range=0.1)
    script = Path(__file__).parent / "ranks.py"
    for world in WORLDS:
        (folder / str(world)).mkdir()
        config = None if world == 1 else on_cpu("cpu_ddp", folder, processes=world)
        run_forked(script, "games", model, folder / str(world), config=config)
    return [folder / str(world) for world in WORLDS]


def dealt(folder, mode):
    """Rows of the global batch of each generation."""
    ranks = [torch.load(file, weights_only=True) for file in sorted(folder.glob("dealt_*.pt"))]
    batches = zip(*([rows for made, rows in rank if made == mode] for rank in ranks), strict=True)
    return [[row for rows in batch for row in rows] for batch in batches]


def test_training_deals_the_same_games_and_samples_the_same_turns(folders):
    one, *others = (dealt(folder, "train") for folder in folders)
    assert len(one) == 6  # two steps, each a generation and two rounds of dynamic sampling
    assert all(len({seed for _, seed, _ in rows}) == 4 for rows in one)
    assert len({seed for rows in one for _, seed, _ in rows}) == 24
    for other in others:
        assert other == one


def test_evaluation_plays_one_game_for_each_prompt(folders):
    """Seven prompts of four attempts do not fill the last batch: fillers repeat the first rows."""
    found = []
    for folder in folders:
        rows = [(prompt, seed, str(turns)) for batch in dealt(folder, "eval") for prompt, seed, turns in batch]
        found.append(set(rows))
        assert len({prompt for prompt, _, _ in rows}) == len({seed for _, seed, _ in rows}) == 7
    assert found[0] == found[1]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", ["held_out", "played"])
@pytest.mark.cases(4)
def test_an_evaluation_set_is_sampled_alike(name, limit, folders):
    """Also where the last chunk is shorter than the others of its round."""
    one, *others = ((folder / f"{name}_{limit}.jsonl").read_bytes() for folder in folders)
    chunks = [json.loads(line)["samples"] for line in one.decode().splitlines()[1:]]
    assert [sample["index"] for chunk in chunks for sample in chunk] == [
        i for i in range(limit) for _ in range(SAMPLES)
    ]
    for other in others:
        assert other == one
