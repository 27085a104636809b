"""A trajectory's one gradient and what it costs: `make bench-trajectories`, for a quiet machine.

Gradients: of every loss, in float64 and float32, the relative difference between a trajectory as a packed tree and as
one row for each turn, whose log-probabilities are concatenated before the loss; beside it the loss of those rows as
separate completions. Steps: forward and backward of a group of 8 conversations of 10 turns on one
thread, in CPU seconds, medians of pairs: packed, as one plain row each, as one row for each turn; once where contexts
grow, once where half of the messages are stripped from later ones. Writes results/trajectories.json.
"""

import json
import os
import random
import statistics
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("tests", "tests/packing")]

import test_trees

from grpo_ext.objective.trajectory import Trajectory, Turn
from grpo_ext.packing.lm_head import labelled_positions_only
from grpo_ext.packing.policy import PrefixSharing
from grpo_ext.packing.tree import is_plain, pack_tree, plain_rows
from support import rewritten
from support.float64 import float64_throughout
from support.pure import objective

RESULT = HERE / "results" / "trajectories.json"
TURNS, GROUP, PROMPT, SAID, TOLD = 10, 8, 128, 32, 16
PAIRS = 5
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


# Gradients.


def gradients(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Relative differences of every loss from the gradient of a row for each turn."""
    model, made = test_trees.network(dtype), test_trees.TRAJECTORIES
    tree = test_trees.scores(model, made, "true")[0]
    apart, known = test_trees.by_turn(model, made)[0], tree.detach()
    given = test_trees.fixed(rewritten.padded(made)[-1], dtype)
    found = {}
    for name in test_trees.ROWS:
        settled = objective(name)
        expected = test_trees.gradient(settled, model, apart, known, given)
        ours = test_trees.gradient(settled, model, tree, known, given)
        naive = test_trees.gradient(settled, model, *test_trees.as_rows(made, apart, known, given))
        found[name] = {"tree": test_trees.off(ours, expected), "naive": test_trees.off(naive, expected)}
    return found


# Steps.


def conversations(strip: bool) -> list[Trajectory]:
    """Return a group; with `strip` half of the messages are removed from later contexts."""
    r, made = random.Random(0), []
    prompt = [r.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT)]
    for _ in range(GROUP):
        turns, context = [], prompt
        for _ in range(TURNS):
            said, told = ([r.randrange(3, SHAPE["vocab_size"]) for _ in range(n)] for n in (SAID, TOLD))
            turns.append(Turn(context, said))
            context = context + (said[SAID // 2 :] if strip else said) + told
        made.append(Trajectory(turns))
    return made


def apart(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Each turn as a row of its own."""
    return [Trajectory([turn]) for made in trajectories for turn in made.turns]


def seconds(model: LlamaForCausalLM, trajectories: list[Trajectory], setting: str) -> float:
    """CPU seconds of a forward and a backward, packing included, by TRL's fused head over labelled positions."""
    ids, mask, parents, _ = map(torch.tensor, rewritten.padded(trajectories))
    completion, sharing = parents.shape[1], PrefixSharing(setting, model)

    def plain(ids: torch.Tensor, mask: torch.Tensor, completion: int) -> tuple:
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-completion] = -100
        out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return out.log_probs[:, -completion:], None, None

    model.zero_grad()
    begin = time.process_time()
    with labelled_positions_only(torch.device("cpu")):
        forwards = plain, test_trees.packed(model)
        logps = sharing.scores(*forwards, ids, mask, completion, len(ids), False, False, parents)[0]
        logps.sum().backward()
    return time.process_time() - begin


def steps() -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(pad_token_id=0, eos_token_id=1, bos_token_id=None, **SHAPE))
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    found = {}
    for name, strip in (("contexts that grow", False), ("thinking stripped", True)):
        made = conversations(strip)
        ids, mask, parents, _ = rewritten.padded(made)
        sides = {"ours": (made, "true"), "a plain row each": (made, "false"), "a row a turn": (apart(made), "false")}
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(PAIRS):
            for side, given in sides.items():
                times[side].append(seconds(model, *given))
        rows = plain_rows(ids, mask, parents).mask.sum()
        tree = pack_tree(ids, mask, parents)
        found[name] = {side: statistics.median(values) for side, values in times.items()} | {
            "one plain row": is_plain(parents, mask[:, -parents.shape[1] :]),
            "tokens of the tree": tree.tokens,
            "tokens of the plain rows": int(rows),
            "tokens of a row a turn": int(rewritten.padded(apart(made))[1].sum()),
        }
        for side in ("a plain row each", "a row a turn"):
            ratios = [other / ours for other, ours in zip(times[side], times["ours"], strict=True)]
            found[name][f"{side} / ours"] = statistics.median(ratios)
    return found


@float64_throughout()
def exact() -> dict[str, dict[str, float]]:
    return gradients(torch.float64)


def main() -> None:
    result = {"float64": exact(), "float32": gradients(torch.float32), "steps": steps()}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for dtype in ("float64", "float32"):
        worst = max(result[dtype].items(), key=lambda item: item[1]["tree"])
        print(f"{dtype}: at most {worst[1]['tree']:.1e} ({worst[0]}) off a row for each turn")
    for name, row in result["steps"].items():
        print(name, {key: round(value, 2) for key, value in row.items()})


if __name__ == "__main__":
    main()
