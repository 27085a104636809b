"""A trajectory as one row: each token once, sampled ids as they were sampled, whatever a template makes of them."""

import random

import pytest

from grpo_ext.objective.trajectory import Trajectory, Tree, Turn, batch, common, paths

EOS = 1


def trajectory(*turns, **more):
    return Trajectory([Turn(*turn) for turn in turns], **more)


def test_contexts_that_extend_each_other_are_one_plain_row():
    made = trajectory(([5, 6], [7, 8], [-0.1, -0.2]), ([5, 6, 7, 8, 9], [10, EOS], [-0.3, -0.4]))
    tree = made.tree
    assert (tree.prompt, tree.ids, tree.parents) == ([5, 6], [7, 8, 9, 10, EOS], [-1, 0, 1, 2, 3])
    assert tree.turns == [0, 0, -1, 1, 1]
    assert tree.logprobs == [-0.1, -0.2, 0.0, -0.3, -0.4]
    assert made.rows() == [[5, 6, 7, 8, 9, 10, EOS]]


def test_a_rewritten_context_branches_where_it_differs():
    """The second context has lost the 7 that was sampled first: 8 is context there, trained where it was sampled."""
    made = trajectory(([5, 6], [7, 8]), ([5, 6, 8, 9], [10]), ([5, 6, 7, 8, 11], [12]), ([5, 13], [14]), ([15], [16]))
    tree = made.tree
    assert tree.ids == [7, 8, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert tree.parents == [-1, 0, -1, 2, 3, 1, 5, -2, 7, -3, 9]
    assert tree.turns == [0, 0, -1, -1, 1, -1, 2, -1, 3, -1, 4]
    assert made.rows() == [[5, 6, 8, 9, 10], [5, 6, 7, 8, 11, 12], [5, 13, 14], [15, 16]]


def test_ids_sampled_twice_after_the_same_context_are_trained_twice():
    tree = trajectory(([5], [7, 8]), ([5], [7, 9]), ([5, 7, 9, 3], [4])).tree
    assert tree.ids == [7, 8, 7, 9, 3, 4]
    assert tree.parents == [-1, 0, -1, 2, 3, 4]
    assert tree.turns == [0, 0, 1, 1, -1, 2]


def test_a_state_is_the_environments_or_the_ids_added_to_the_context():
    made = Trajectory([Turn([5, 6], [7]), Turn([5, 6, 7, 8, 9], [3]), Turn([5, 6, 7, 8, 9, 3, 2], [4], state="there")])
    assert made.tree.states == [(5, 6), (8, 9), "there"]


@pytest.mark.parametrize(
    ("turns", "truncated", "ids", "mask"),
    [
        ([([5], [7, EOS])], False, [7, EOS], [1, 1]),
        ([([5], [7, EOS])], True, [7, EOS, 0], [1, 1, 0]),
        ([([5], [7])], True, [7], [1]),
        ([([5], [7])], False, [7, EOS], [1, 0]),
        ([([5], [])], True, [0], [0]),
        ([([5], [])], False, [EOS], [0]),
        ([([5], []), ([5, 6], [7, EOS])], False, [6, 7, EOS], [0, 1, 1]),
    ],
)
def test_a_row_ends_as_its_trajectory_did(turns, truncated, ids, mask):
    """TRL judges by the last token of a completion."""
    rows = batch([trajectory(*turns, truncated=truncated)], {EOS})
    assert (rows.prompt_ids, rows.completion_ids, rows.tool_mask) == ([[5]], [ids], [mask])
    assert rows.logprobs is None


def test_log_probabilities_are_known_for_all_or_for_none():
    known, unknown = trajectory(([5], [7, EOS], [-0.5, -0.25])), trajectory(([5], [8, EOS]))
    assert batch([known, trajectory(([5], [], None), truncated=True)], {EOS}).logprobs == [[-0.5, -0.25], [0.0]]
    assert batch([known, unknown], {EOS}).logprobs is None
    nothing = trajectory(([5], [], None), truncated=True)
    assert batch([nothing], {EOS}).logprobs is None
    assert batch([nothing], {EOS}, logprobs=True).logprobs == [[0.0]]
    assert batch([known], {EOS}, logprobs=False).logprobs is None


@pytest.mark.parametrize(("turn", "words"), [(([], [3]), "without a context"), (([5], [3, 4], [-1.0]), "2 sampled")])
def test_a_turn_without_a_context_or_with_too_few_logprobs_is_refused(turn, words):
    with pytest.raises(ValueError, match=words):
        Turn(*turn)
    with pytest.raises(ValueError, match="without a turn"):
        Trajectory([])


def ways(made):
    """Every token's whole path from the beginning, by the tree alone."""
    tree, found = made.tree, []
    for i, token in enumerate(tree.ids):
        parent = tree.parents[i]
        assert parent < i
        before = found[parent] if parent >= 0 else tree.prompt[: len(tree.prompt) + 1 + parent]
        found.append([*before, token])
    return found


def by_comparing_all(turns):
    """The tree by its definition: each context compared with all that each turn before has read and written."""
    prompt, rows, states = turns[0].context, [], []
    ways = [(prompt, list(range(-len(prompt), 0)))]
    for number, turn in enumerate(turns):
        shared, places = max(((common(ids, turn.context), places) for ids, places in ways), key=lambda way: way[0])
        path, news = places[:shared], turn.context[shared:]
        known = [None] * len(turn.sampled) if turn.logprobs is None else turn.logprobs
        for token, author, logprob in [
            *((token, -1, 0.0) for token in news),
            *((token, number, logprob) for token, logprob in zip(turn.sampled, known, strict=True)),
        ]:
            path.append(len(rows))
            rows.append((token, path[-2] if len(path) > 1 else -len(prompt) - 1, author, logprob))
        states.append(turn.state or tuple(news if number else prompt))
        ways.append((turn.context + turn.sampled, path))
    return Tree(prompt, *(list(column) for column in zip(*rows, strict=True)), states)


def test_the_tree_equals_comparing_every_context_with_every_turn():
    """Two tokens and contexts that are cut, repeated and joined: much is alike by chance, and sampled twice."""
    r, several = random.Random(1), 0
    for _ in range(1500):
        turns = [Turn([r.randrange(2) for _ in range(r.randint(1, 4))], [r.randrange(2) for _ in range(3)])]
        for _ in range(r.randint(0, 8)):
            before = r.choice(turns)
            context = (before.context + before.sampled)[: r.randint(1, 9)] + [r.randrange(2)] * r.randint(0, 2)
            sampled = r.choice([before.sampled, [r.randrange(2) for _ in range(r.randint(0, 4))]])
            logprobs = r.choice([None, [-r.random() for _ in sampled]])
            turns.append(Turn(context, sampled, logprobs, state=r.choice([None, "there"])))
        made = Trajectory(turns)
        tree, found = made.tree, ways(made)
        assert tree == by_comparing_all(turns)
        for number, turn in enumerate(turns):  # each sampled token is trained once, after what it was sampled after
            places = [i for i, of in enumerate(tree.turns) if of == number]
            assert [found[i] for i in places] == [
                turn.context + turn.sampled[: n + 1] for n in range(len(turn.sampled))
            ]
        context = [tuple(found[i]) for i, of in enumerate(tree.turns) if of < 0]
        assert len(context) == len({*context})  # a token of a context is there once
        rows = made.rows()
        sampled = {tuple(way) for way, of in zip(found, tree.turns, strict=True) if of >= 0}
        assert {tuple(row[: n + 1]) for row in rows for n in range(len(row))} >= sampled
        several += len(rows) > 1
    assert several > 500


@pytest.mark.parametrize(
    ("one", "other", "n"), [([], [1], 0), ([1], [2], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 4], [1, 2, 3, 5], 2)]
)
def test_common_is_the_length_of_the_common_prefix(one, other, n):
    assert common(one, other) == common(other, one) == n
    padded = [0] * 37
    assert common(padded + one, padded + other) == 37 + n


def test_paths_to_each_leaf_of_a_tree():
    assert paths([], 3) == [(3, [])]
    assert paths([-1, 0, -2, 2, 0], 3) == [(3, [0, 1]), (2, [2, 3]), (3, [0, 4])]
