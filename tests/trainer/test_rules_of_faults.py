"""The table of rules: each rule finds its fault in a log, and finds nothing in a similar sound one."""

import math

import pytest

from grpo_ext.trainer.diagnosis.rules import RULES, diagnose
from support.histories import history


def level(value):
    return {"sampling/mismatch": value}


KEPT = ("", "_short", "_long")
GROWING = {"sampling/mismatch": lambda n: 2e-3 * n, "sampling/bias": lambda n: 2e-4 * n}
TURNS = {"sampling/mismatch_first_turn": 0.02, "sampling/mismatch_later_turns": 0.16}
DEPTHS = {"sampling/mismatch_from_0": 0.02, "sampling/mismatch_from_128": 0.16}
SILENT = {"advantages/zero_variance_groups": 1.0, "groups/all_wrong": 1.0}
HACKED = {"reward": 2.1, "eval_test/avg@1": 0.25, "eval_test/avg@1_low": 0.2, "eval_test/avg@1_high": 0.3}
FAULTS = {
    "reward fails": ({"rewards/format/errors": 64.0, "rewards/format/none_frac": 1.0, "rewards/format/std": None}, 2),
    "environment fails": ({"environments/guess/failed": 0.75}, 3),
    "agent fails": (SILENT | {"environments/command/nonzero_exit": 1.0}, 5),
    "skipped steps": ({"nonfinite/skipped_steps": 1.0}, 3),
    "misplaced mask": ({"completions/mask_misplaced": 0.8}, 2),
    "all masked": ({"completions/skipped": 1.0, "completions/mask_misplaced": None, "grad_norm": 0.0}, 5),
    "no weight moves": ({"weights/change": lambda n: (7e-10, 3e-9)[n % 2]}, 3),
    "end token lost": ({"completions/clipped_ratio": 1.0}, 3),
    "advantages of other rows": (
        {name: lambda n: 0.2 * (-1) ** n for name in (
            "advantages/of_reward", "rewards/accuracy/of_advantage", "rewards/format/of_advantage")}, 3,
    ),
    "rewards of other rows": ({"rewards/same_text_differs": 0.6}, 3),
    "steps too large": ({"weights/change": 0.02, "reward": 0.3}, 3),
    "policy collapsed": ({"entropy": 0.0, "reward": 0.1, "weights/change": 0.0}, 3),
    "drift by turn": (level(0.09) | TURNS | DEPTHS | {"sampling/mismatch_from_0": 0.05}, 3),
    "drift by depth": (level(0.09) | DEPTHS | TURNS | {"sampling/mismatch_first_turn": 0.05}, 3),
    "another prompt": (level(2.0), 3),
    "truncated sampling": (level(0.02) | {"sampling/bias": 0.0199}, 3),
    "stale sampler": (GROWING, 5),
    "sampler's precision": (level(0.002), 5),
    "nearly all dropped": ({f"sampling/kept{third}": lambda n: (0.01, 0.09)[n % 2] for third in KEPT}, 3),
    "long completions dropped": ({"sampling/kept_long": lambda n: (0.5, 0.3)[n % 2]}, 3),
    "short completions dropped": ({"sampling/kept_short": lambda n: (0.4, 0.6)[n % 2]}, 3),
    "stale batches": ({"ratio/ess_completions": lambda n: (0.1, 0.29)[n % 2], "clip_ratio/region_mean": 0.15}, 3),
    "sign of a reward": ({"rewards/accuracy/mean": lambda n: -(0.5, 0.45)[n % 2]}, 3),
    "constant reward": ({"rewards/accuracy/mean": 0.5, "rewards/accuracy/std": 0.0}, 3),
    "reward without gain": (HACKED, 2),
    "completions no longer end": ({"completions/clipped_ratio": 0.9}, 3),
    "no signal": (SILENT, 5),
}  # fmt: skip
"""What changes in a sound log from step 11 on, or from the first, and how many logs later it is named."""
FROM_THE_FIRST = {"no signal", "agent fails", "no weight moves"}

NEIGHBOURS = {
    "reward fails": {"rewards/format/errors": 3.0, "rewards/format/none_frac": 0.05, "rewards/format/std": 0.0},
    "environment fails": {"environments/guess/failed": lambda n: 0.75 * (n % 2)},
    "agent fails": {"environments/command/nonzero_exit": 1.0},  # its test or its file pays
    "skipped steps": {"nonfinite/skipped_steps": lambda n: float(n % 3 == 0)},
    "misplaced mask": {"completions/mask_misplaced": None, "completions/skipped": 0.8},
    "all masked": {"completions/skipped": lambda n: float(n % 5 > 0)},
    "no weight moves": {"weights/change": 0.0, "learning_rate": 0.0},  # the end of a schedule
    "end token lost": {"completions/clipped_ratio": 0.75, "completions/min_length": 12},
    "advantages of other rows": {"advantages/of_reward": 0.2},  # rewards normalised one by one
    "rewards of other rows": {"rewards/same_text_differs": 0.1},
    "steps too large": {"weights/change": 0.02},
    "policy collapsed": {"entropy": 0.0, "reward": 1.5},  # a task that is learned
    "drift by turn": dict.fromkeys(TURNS, 4e-08),
    "drift by depth": level(1e-7) | {"sampling/mismatch_from_128": 1e-5, "sampling/mismatch_from_1k": 2e-5},
    "another prompt": level(2e-7),
    "truncated sampling": level(1e-5) | {"sampling/bias": 1e-5},
    "stale sampler": {"sampling/mismatch": lambda n: 5e-2 * (n == 3)},
    "sampler's precision": level(1e-5),
    "nearly all dropped": {f"sampling/kept{third}": lambda n: (0.04, 0.12)[n % 2] for third in KEPT},
    "long completions dropped": {"sampling/kept_long": lambda n: (0.95, 0.6)[n % 3 == 0]},
    "short completions dropped": {"sampling/kept_short": lambda n: (0.95, 0.6)[n % 3 == 0]},
    "stale batches": {"ratio/ess_completions": 0.1, "clip_ratio/region_mean": lambda n: 0.09 * (n % 2)},
    "sign of a reward": {"rewards/accuracy/mean": lambda n: 0.3 - 0.01 * n},
    "constant reward": {"rewards/format/mean": 1.0, "rewards/format/std": 0.0},
    "reward without gain": HACKED | {"eval_test/avg@1_high": 0.5},
    "completions no longer end": {"completions/clipped_ratio": lambda n: 0.9 if n % 3 else 0.5},
    "no signal": {"advantages/zero_variance_groups": 1.0, "groups/all_right": 1.0},  # a task that is learned
}
"""What is like the fault, and none."""


def test_every_rule_has_its_case_and_its_neighbour():
    assert list(FAULTS) == list(NEIGHBOURS) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_once_at_its_step_and_first(name):
    changes, rows = FAULTS[name]
    since = 1 if name in FROM_THE_FIRST else 11
    found = diagnose(history(changes, since=since))
    assert [(f.rule.name, f.step) for f in found][:1] == [(name, since - 1 + rows)]
    assert len({f.rule.name for f in found}) == len(found)
    assert name in str(found[0])
    assert found[0].rule.cure in str(found[0])


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_similar_sound_log_has_no_fault(name):
    assert not diagnose(history(NEIGHBOURS[name]))


SOUND_RUNS = {
    "attempts of environments end by max_turns": {"completions/clipped_ratio": 1.0, "environments/guess/turns": 8.0},
    "a format reward of -1 or 1 is learned within a log": {
        "rewards/format/mean": lambda n: (0.85, 0.93, 0.97, 0.97)[min(n, 4) - 1],
        "rewards/format/std": 0.3,
    },
    "a penalty that was never due is due": {
        "rewards/soft_overlong/mean": lambda n: -0.01 * max(0, n - 8),
        "rewards/soft_overlong/std": lambda n: 0.06 * (n > 8),
    },
    "a task is learned": {
        "rewards/accuracy/mean": 1.0, "rewards/accuracy/std": 0.0, "advantages/zero_variance_groups": 1.0,
        "groups/all_right": 1.0, "entropy": 0.02, "rewards/format/mean": 1.0, "rewards/format/std": 0.0,
    },
    "completions grow": {"completions/mean_length": lambda n: 33 + 3 * n, "rewards/accuracy/of_length": 0.95},
    "one of two rewards is traded for the other": {
        "rewards/format/of_advantage": 0.95, "rewards/accuracy/of_advantage": 0.1, "rewards/accuracy/mean": 0.2,
    },
}  # fmt: skip
"""Runs in which nothing is wrong, and of which the metrics move."""


@pytest.mark.parametrize("name", SOUND_RUNS)
def test_a_sound_run_with_changing_metrics_has_no_fault(name):
    log = history(SOUND_RUNS[name])
    for row in log[:10] if "format reward" in name else ():
        row |= {"rewards/format/mean": -0.9, "rewards/format/std": 0.4}
    if "environments" in name:
        for row in log:
            row |= {"environments/guess/turns": 8.0, "completions/clipped_ratio": 1.0}
    assert not diagnose(log)


def test_a_sound_run_has_no_fault():
    assert not diagnose(history(steps=60))


NOTHING_YET = {
    "a warm-up from a rate of 0": {"learning_rate": lambda n: 1e-9 * n},
    "no gradient yet": {"grad_norm": 0.0},
    "no advantage yet, and a KL that is rounding": SILENT | {"grad_norm": 1e-12},
    "the scaler of fp16 looks for its factor": {"grad_norm": math.inf},
}
"""Beginnings of sound runs in which no weight moves."""


@pytest.mark.parametrize("name", NOTHING_YET)
def test_a_run_whose_weights_rest_at_first_has_no_fault(name):
    log = history({"weights/change": 0.0} | NOTHING_YET[name], since=1, steps=4) + history(steps=20)[4:]
    assert not diagnose(log)


def test_what_is_the_same_in_every_log_is_found_in_a_short_one():
    """With two logs, one of which may be the first step of a warm-up, and not while more may follow."""
    still = history({"weights/change": 0.0}, since=1, steps=2)
    assert [f.rule.name for f in diagnose(still)] == ["no weight moves"]
    assert not diagnose(still[:1])
    warm_up = history({"weights/change": 0.0, "learning_rate": lambda n: 1e-9 * n}, since=1, steps=5)
    assert [f.rule.name for f in diagnose(warm_up)] == ["no weight moves"]  # longer than the run
    masked = history({"completions/skipped": 1.0}, since=1, steps=1)
    assert [f.rule.name for f in diagnose(masked)] == ["all masked"]


def test_a_first_step_that_destroys_the_policy_is_found_in_the_next_logs():
    """Only the first log is of the sound policy, and its step alone is large."""
    gone = {"reward": 0.0, "weights/change": 0.0, "grad_norm": 0.0}
    certain = history(gone | {"entropy": 0.0}, since=2, steps=4)
    assert [(f.rule.name, f.step) for f in diagnose(certain)] == [("policy collapsed", 4)]
    texts = SILENT | {"entropy": None, "groups/distinct": 0.125}  # without a gradient no entropy is computed
    found = diagnose(history(gone | texts, since=2, steps=21))
    assert [(f.rule.name, f.step) for f in found] == [("policy collapsed", 21)]
    noise = SILENT | {"entropy": None, "groups/distinct": 1.0}  # within the first log, so that it is half destroyed
    log = history({"weights/change": 0.003, "reward": 0.1}, since=1, steps=1) + history(gone | noise, steps=16)[11:]
    assert [(f.rule.name, f.step) for f in diagnose(log)] == [("policy collapsed", 16)]
    assert not diagnose(log[:3])
    moved = {"reward": 0.0, "entropy": 2.0, "weights/change": 0.03}
    assert [(f.rule.name, f.step) for f in diagnose(history(moved, since=1, steps=6))] == []
    log = history()[:1] + history(moved, since=2, steps=6)[1:]
    assert [(f.rule.name, f.step) for f in diagnose(log)] == [("steps too large", 4)]


@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("another prompt", level(2.0)),
        ("misplaced mask", FAULTS["misplaced mask"][0]),
        ("advantages of other rows", FAULTS["advantages of other rows"][0]),
    ],
)
def test_an_impossible_value_is_found_in_the_first_steps(name, changes, since):
    assert [f.rule.name for f in diagnose(history(changes, since=since))] == [name]


@pytest.mark.parametrize("value", [0.15, 0.5])
def test_older_weights_differ_from_the_first_steps_on_and_that_is_no_fault(value):
    ages = {"overlap/age": lambda n: float(min(n, 2))}
    assert not diagnose(history(level(value) | ages, since=2))
    assert diagnose(history(level(value), since=2))
    leaps = {"overlap/age": 2.0, "sampling/mismatch": lambda n: 1e-3 if n < 11 else value}
    assert diagnose(history(leaps, since=1))


REAL = dict.fromkeys(("from_0", "from_128", "from_1k"), 0.02) | {"from_8k": 0.09, "from_64k": 0.16}
"""Nats by depth of a sampler that is wrong beyond 64 k tokens only, while the mean is 0.09."""


def placed(found) -> dict:
    return level(0.09) | {f"sampling/mismatch_{name}": value for name, value in found.items()}


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (REAL, ["drift by depth"]),
        (REAL | {"from_64k": None}, ["drift by depth"]),  # completions grow into the fault: 0.09 is below the limit
        (dict.fromkeys(REAL, 0.09), []),
        ({"from_0": 0.09, "from_128": 0.3}, []),  # 3.3 times
        ({"from_0": 0.01, "from_128": 0.09}, []),  # 9 times, but rounding to bfloat16
        ({"first_turn": 0.02, "later_turns": 0.16, "from_0": 0.02, "from_128": 0.1}, ["drift by turn"]),
        ({"first_turn": 0.03, "later_turns": 0.15, "from_0": 0.02, "from_128": 0.16}, ["drift by depth"]),
        # in float32 the rounding before the places says nothing of them: 1.5e7 and 8.3e6 times
        ({"first_turn": 1e-8, "later_turns": 0.15, "from_0": 6e-8, "from_128": 0.5}, ["drift by depth"]),
        ({"first_turn": 0.16, "later_turns": 0.02}, []),
    ],
)  # fmt: skip
def test_a_mismatch_is_placed_in_the_first_logs_where_it_is_sharp_and_beyond_rounding(found, names):
    log = history(placed(found), since=1, steps=4)
    if found == REAL | {"from_64k": None}:
        log[1:] = history(placed(REAL), since=1, steps=4)[1:]
    assert [f.rule.name for f in diagnose(log)] == names


def test_the_evidence_names_places_times_and_every_depth():
    (found,) = diagnose(history(placed(REAL), since=1, steps=3))
    assert found.evidence == (
        "sampling/mismatch_from_64k 0.16 nats per token in 3 logs, 8 times sampling/mismatch_from_0 (0.02); by depth "
        "0.02 from token 1, 0.02 from token 129, 0.02 from token 1,025, 0.09 from token 8,193, 0.16 from token 65,537"
    )
    assert (found.rule.name, found.step) == ("drift by depth", 3)


@pytest.mark.parametrize("mean", [0.09, 0.25])
@pytest.mark.parametrize("name", ["drift by turn", "drift by depth"])
def test_a_mismatch_that_has_a_place_has_no_other_name(name, mean):
    """At these levels, without a place it would be the sampler's precision or another prompt."""
    changes = FAULTS[name][0] | level(mean)
    assert [f.rule.name for f in diagnose(history(changes))] == [name]
    assert [f.rule.name for f in diagnose(history(level(mean)))] in (["sampler's precision"], ["another prompt"])


@pytest.mark.parametrize(("value", "named"), [(0.02, False), (0.12, True)])
def test_deep_tokens_that_become_uncertain_are_rounded_more(value, named):
    """In bfloat16; 20 times all earlier mismatches is what entropy makes of rounding, beyond 0.1 it is not."""
    log = history({"sampling/mismatch_from_0": 1e-3, "sampling/mismatch_from_128": 1e-3}, since=1)
    for row in log[10:]:
        row["sampling/mismatch_from_128"] = value
    assert [f.rule.name for f in diagnose(log)] == ["drift by depth"] * named


@pytest.mark.parametrize("place", ["later_turns", "from_128"])
def test_a_truncated_distribution_is_truncated_at_any_place(place):
    """Of a first turn that is certain no token is cut; the mismatch of the others is the logarithm of what is kept."""
    found = placed({"first_turn": 0.01, "from_0": 0.01, place: 0.15}) | {"sampling/bias": 0.0899}
    assert [f.rule.name for f in diagnose(history(found, since=1, steps=4))] == ["truncated sampling"]


@pytest.mark.parametrize("values", [TURNS, DEPTHS])
def test_a_policy_that_moves_far_from_older_weights_at_a_place_is_not_a_fault_of_the_sampler(values):
    ages = {"overlap/age": lambda n: float(min(n, 2))}
    assert not diagnose(history(placed({}) | values | ages, since=2))
    assert diagnose(history(placed({}) | values, since=2))


@pytest.mark.parametrize("value", [None, math.nan, "nan", True, 10**400])
def test_a_metric_that_is_not_a_number_is_unknown(value):
    changes = {name: value for name in history()[0] if name not in ("step", "reward")}
    assert not diagnose(history(changes))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e99, -1e99])
def test_logs_with_extreme_values_are_read(value):
    rows = history({name: value for name in history()[0] if name != "step"}, since=1, steps=30)
    mixed = history({name: lambda n: value * (n % 3) for name in history()[0] if name != "step"}, since=4, steps=30)
    for log in (rows, mixed):
        found = diagnose(log)
        assert len({f.rule.name for f in found}) == len(found)
        assert all(f.evidence and 1 <= f.step <= 30 for f in found)


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", FAULTS)
def test_a_missing_metric_switches_off_only_its_rules(name):
    changes, rows = FAULTS[name]
    log = history(changes, steps=10 + rows)[10 - 5 :]
    for missing in log[0]:
        found = diagnose({k: v for k, v in row.items() if k != missing} for row in log)
        assert all(f.evidence and missing not in f.evidence.split() for f in found), missing


STALE = {"ratio/ess_completions": 0.2, "clip_ratio/region_mean": 0.3}


def test_rows_without_a_reward_are_read():
    rows = [STALE | {"loss": 0.1, "grad_norm": 1.0, "step": step} for step in range(1, 9)]
    assert [(f.rule.name, f.step) for f in diagnose(rows)] == [("stale batches", 3)]


def test_further_steps_on_a_generation_leave_the_rows_of_rewards_consecutive():
    rows = history(FAULTS["constant reward"][0])
    further = [row for r in rows for row in (r, {"grad_norm": 1.0, "ratio/ess_completions": 0.9, "step": r["step"]})]
    assert [(f.rule.name, f.step) for f in diagnose(further)] == [("constant reward", 13)]


def test_a_generation_that_begins_with_its_own_policy_is_not_stale():
    """Of three steps on each generation the first has a ratio of 1."""
    fresh = {"ratio/ess_completions": 1.0, "clip_ratio/region_mean": 0.0, "reward": 0.5}
    rows = [(STALE if step % 3 else fresh) | {"grad_norm": 1.0, "step": step} for step in range(40)]
    assert not diagnose(rows)


def test_a_log_without_metrics_has_no_fault():
    assert not diagnose([{"reward": 0.1 * s, "kl": 0.01, "step": s} for s in range(30)])


def test_evaluations_and_summaries_are_no_rows_of_training():
    rows = history(FAULTS["misplaced mask"][0])
    mixed = [row for r in rows for row in (r, {"eval_reward": 0.0, "step": r["step"]}, {"train_loss": 1.0, "step": 9})]
    assert [(f.rule.name, f.step) for f in diagnose(mixed)] == [("misplaced mask", 12)]


@pytest.mark.parametrize("off", [0.01, 0.3])
def test_a_depth_that_only_some_steps_reach_is_named_from_their_logs(off):
    """In bfloat16 every depth differs by 0.01, and a sampler may be wrong beyond token 1,024."""
    rounding = {f"sampling/mismatch{name}": 0.01 for name in ("", "_from_0", "_from_128", "_from_1k")}
    log = history(rounding | dict.fromkeys(TURNS), since=1, steps=40)
    for row in log[20:]:
        row |= {"sampling/mismatch": 0.06, "sampling/mismatch_from_128": 0.02} if off > 0.01 else {}
        row["sampling/mismatch_from_1k"] = off
    for row in log[::2]:
        row["sampling/mismatch_from_1k"] = None
    assert [f.rule.name for f in diagnose(log)] == (["drift by depth"] if off > 0.01 else [])
