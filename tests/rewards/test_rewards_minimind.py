"""MiniMind's composite rewards against values worked out by hand."""

import random
import re

import pytest

from grpo_ext.errors import UnknownNameError
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library.minimind import (
    minimind_format,
    minimind_lengths,
    minimind_repetition,
    one_question,
)
from grpo_ext.rewards.models.scoring import clipped_score
from grpo_ext.rewards.text import TAGS

minimind, minimind_current = rewards["minimind"], rewards["minimind_current"]

GOOD = "<think>\nreason\n</think>\n<answer>\n42\n</answer>"
BLANK = "<think>\nreason\n</think>\n\n<answer>\n42\n</answer>"
ALL_TAGS = "<think>a</think><answer>b</answer>"
T20, T300, T301 = "x" * 20, "x" * 300, "x" * 301
NAN, INF = float("nan"), float("inf")

# (completion, score of the whole, score of the answer alone, minimind, minimind_current);
# the scorer of this table gives the current version, which sees one text only, the third column.
TABLE = [
    # well-formed: .5 + 1 + .4 f + .6 a | length .5 (46 chars), thinking "<think>\nreason" 14 chars: -.5, one tag .25
    (GOOD, 1.0, 2.0, 1.5 + 1.6, 0.25 + 2.0),
    (BLANK, 1.0, 2.0, 1.5 + 1.6, 0.25 + 2.0),
    (GOOD, 9.0, 9.0, 4.5, 0.25 + 3.0),  # the most
    ("", -9.0, 1.0, -3.0, -0.5 + 1.0),  # the least
    (GOOD, -9.0, -9.0, -1.5, 0.25 - 3.0),
    (GOOD, 9.0, -9.0, 1.5 + 1.2 - 1.8, 0.25 - 3.0),
    (GOOD, -9.0, 1.0, 1.5 - 1.2 + 0.6, 0.25 + 1.0),
    # one newline may follow, as in MiniMind
    (GOOD + "\n", 1.0, 2.0, 1.5 + 1.6, 0.25 + 2.0),
    # layout broken, tags right: 1 + .4 f + .6 a
    (GOOD + "\n\n", 1.0, 2.0, 1.0 + 1.6, 0.25 + 2.0),
    ("<think>\nreason\n</think>\n\n\n<answer>\n42\n</answer>", 1.0, 2.0, 1.0 + 1.6, 0.25 + 2.0),
    (GOOD + " and more", 1.0, 2.0, 1.0 + 1.6, 0.25 + 2.0),
    ("well: " + GOOD, 1.0, 2.0, 1.0 + 1.6, 0.25 + 1.0 + 0.5 + 2.0),  # thinking is 20 characters now: 1 for -.5
    (ALL_TAGS, 1.0, 2.0, 1.0 + 1.6, 0.25 + 2.0),
    ("<answer>\n42\n</answer>\n<think>\nreason\n</think>", 1.0, 2.0, 1.0 + 1.6, 0.5 + 1.0 + 0.25 + 2.0),
    # missing tags
    ("<think>\nreason\n<answer>\n42\n</answer>", 1.0, 2.0, 0.75 + 1.6, 0.5 + 2.0),
    ("reason\n</think>\n<answer>\n42\n</answer>", 1.0, 2.0, 0.75 + 1.6, 0.25 + 2.0),
    ("<think>\nreason\n</think>\n42\n</answer>", 1.0, 2.0, 0.75 + 1.0, 0.25 + 2.0),
    ("<think>\nreason\n</think>\n<answer>\n42", 1.0, 2.0, 0.75 + 1.0, 0.25 + 2.0),
    ("<think>\nreason\n</think>\n42", 1.0, 2.0, 0.5 + 1.0, 0.25 + 2.0),
    ("forty-two", 1.0, 2.0, 1.0, -0.5 + 2.0),
    ("", 1.0, 2.0, 1.0, -0.5 + 2.0),
    # duplicated and nested tags: only the tags that occur once count; the layout is kept, as in MiniMind
    (
        GOOD + GOOD,
        1.0,
        2.0,
        0.5 + 1.6,
        0.5 - 0.5 - 0.25 - 6 / 22 + 2.0,
    ),  # the answer block comes twice: 6 of 22 trigrams
    ("<think>\n<think>\nr\n</think>\n</think>\n<answer>\n42\n</answer>", 1.0, 2.0, 1.0 + 1.6, 0.5 - 0.5 - 0.25 + 2.0),
    # trigrams "< answer >", "< / answer", "/ answer >", "answer > <" come twice among the 13 of the answer
    ("<think>\nr\n</think>\n<answer>\n<answer>\n42\n</answer>\n</answer>", 1.0, 2.0, 1.0 + 1.6, 0.25 - 4 / 13 + 2.0),
    # contents empty: the layout asks for the newlines only
    ("<think>\n\n</think>\n<answer>\n42\n</answer>", 1.0, 2.0, 1.5 + 1.6, 0.25 + 2.0),
    ("<think>\n</think>\n<answer>\n42\n</answer>", 1.0, 2.0, 1.0 + 1.6, 0.25 + 2.0),
    ("<think>\nreason\n</think>\n<answer>\n\n</answer>", 1.0, 2.0, 1.5 + 1.6, 0.25 + 2.0),
    # lengths of the current version, at their borders
    (T20, 1.0, 2.0, 1.0, 0.5 + 2.0),
    (T20[1:], 1.0, 2.0, 1.0, -0.5 + 2.0),
    ("x" * 800, 1.0, 2.0, 1.0, 0.5 + 2.0),
    ("x" * 801, 1.0, 2.0, 1.0, -0.5 + 2.0),
    (T20 + "</think>42", 1.0, 2.0, 0.25 + 1.0, 0.5 + 1.0 + 0.25 + 2.0),
    (T300 + "</think>42", 1.0, 2.0, 0.25 + 1.0, 0.5 + 1.0 + 0.25 + 2.0),
    (T301 + "</think>42", 1.0, 2.0, 0.25 + 1.0, 0.5 - 0.5 + 0.25 + 2.0),
    # repetition of the answer: 6 words, 4 trigrams, 2 unique: min(.5, 2 * .5 * 2/4) = .5; 5 words: 3, 2 unique: 1/3
    (T20 + "</think>a b a b a b", 1.0, 2.0, 0.25 + 1.0, 1.75 - 0.5 + 2.0),
    (T20 + "</think>a b a b a", 1.0, 2.0, 0.25 + 1.0, 1.75 - 1 / 3 + 2.0),
    ("a b a b a " + T20 + "</think>c d e f g", 1.0, 2.0, 0.25 + 1.0, 1.75 + 2.0),
    # unscorable in full, in the answer
    (GOOD, None, 2.0, None, 2.25),
    (GOOD, 1.0, NAN, None, None),
    (GOOD, INF, 1.0, None, 1.25),
    ("forty-two", 1.0, None, 1.0, None),
]


def scorer_of(full, answer, completion):
    return lambda chats: [full if chat[-1]["content"] == completion else answer for chat in chats]


@pytest.mark.parametrize(("completion", "full", "answer", "expected", "_"), TABLE)
def test_widely_read_version_by_hand(completion, full, answer, expected, _):
    [reward] = minimind(prompts=["q"], completions=[completion], scorer=scorer_of(full, answer, completion))
    assert reward == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("completion", "_", "score", "__", "expected"), TABLE)
def test_current_version_by_hand(completion, _, score, __, expected):
    [reward] = minimind_current(prompts=["q"], completions=[completion], scorer=lambda chats: [score] * len(chats))
    assert reward == (None if expected is None else pytest.approx(expected))


def test_without_reasoning_only_the_full_score_counts():
    seen = []
    rewards_ = minimind(
        prompts=["q"], completions=[GOOD], scorer=lambda c: seen.extend(c) or [5.0] * len(c), reasoning=False
    )
    assert rewards_ == [3.0]
    assert [chat[-1]["content"] for chat in seen] == [GOOD]


def test_options_move_the_clip_and_the_blend():
    scorer = scorer_of(9.0, -9.0, GOOD)
    [reward] = minimind(prompts=["q"], completions=[GOOD], scorer=scorer, score_clip=2.0, answer_weight=0.25)
    assert reward == pytest.approx(1.5 + 0.75 * 2 - 0.25 * 2)
    text = T20 + "</think>a b a b"  # bigrams ab ba ab: 1 of 3 repeated, 2 * .3 / 3
    [reward] = minimind_current(prompts=["q"], completions=[text], n=2, repetition_cap=0.3)
    assert reward == pytest.approx(1.75 - 0.2)


def test_the_scorer_sees_chats_of_prompt_and_reply_in_one_call():
    calls = []
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    reply = [{"role": "assistant", "content": GOOD}]
    minimind(
        prompts=[prompt, "q2"], completions=[reply, "no tags"], scorer=lambda c: calls.append(c) or [0.0] * len(c)
    )
    assert calls == [
        [
            prompt + reply,
            [{"role": "user", "content": "q2"}, {"role": "assistant", "content": "no tags"}],
            [*prompt, {"role": "assistant", "content": "42"}],
        ]
    ]
    calls.clear()
    minimind_current(prompts=[prompt], completions=[reply], scorer=lambda c: calls.append(c) or [0.0] * len(c))
    question = {"role": "user", "content": "system: s\n以上是对话历史。我的新问题是：\nq"}  # noqa: RUF001
    assert calls == [[[question, {"role": "assistant", "content": "<answer>\n42\n</answer>"}]]]


def test_the_scorer_may_be_a_path(tmp_path, monkeypatch):
    (tmp_path / "my_scorer_module.py").write_text("def score(chats):\n    return [2.0] * len(chats)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert minimind(prompts=["q"], completions=[GOOD], scorer="my_scorer_module:score") == [3.5]
    with pytest.raises(UnknownNameError, match="my_scorer_module"):
        minimind(prompts=["q"], completions=[GOOD], scorer="my_scorer_module:scores")


@pytest.mark.parametrize("version", [minimind, minimind_current])
def test_a_scorer_that_miscounts_is_an_error(version):
    with pytest.raises(ValueError, match="gave 0 scores for"):
        version(prompts=["q"], completions=[GOOD], scorer=lambda chats: [])


def test_the_parts_by_hand():
    texts = (GOOD, BLANK, ALL_TAGS, GOOD + "\n", GOOD + GOOD)
    assert [minimind_format(t, strict=True) for t in texts] == [0.5, 0.5, 0, 0, 0]
    assert [clipped_score(s) for s in (-4, -3, 0.5, 3, 4, None, NAN, -INF)] == [-3, -3, 0.5, 3, 3, None, None, None]
    assert minimind_lengths("</think></think>") == -0.5 - 0.5 - 0.25
    assert [minimind_repetition(t) for t in ("a a a", "a b", "A, a, A, a,")] == [0.0, 0.0, 0.5]
    assert minimind_current(prompts=["q"], completions=[T20]) == [0.5]  # without a scorer


def widely_read(text):
    """Format and tags of jingyaogong/minimind, trainer/train_grpo.py, before 24 March 2026."""
    one, two = (rf"^<think>\n.*?\n</think>\n{blank}<answer>\n.*?\n</answer>$" for blank in ("", "\n"))
    layout = re.match(one, text, re.S) or re.match(two, text, re.S)
    return (0.5 if layout else 0.0) + sum(0.25 for tag in TAGS if text.count(tag) == 1)


def random_text(rng):
    """A layout with its parts repeated, left out or exchanged, so that about half of the texts still fit it."""
    pieces = ["<think>", "\n", "a", "\n", "</think>", "\n", "<answer>", "\n", "b", "\n", "</answer>"]
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(pieces) + 1)
        pieces[place : place + rng.randrange(2)] = rng.choices([*TAGS, "\n", "\n\n", "x", GOOD], k=rng.randrange(3))
    return "".join(pieces)


def test_the_widely_read_version_without_a_scorer_to_the_letter_on_ten_thousand_random_texts():
    rng = random.Random(0)
    texts = [random_text(rng) for _ in range(10_000)]
    expected = [widely_read(text) for text in texts]
    assert minimind(prompts=["q"] * len(texts), completions=texts) == expected
    strict = minimind(prompts=["q"] * len(texts), completions=texts, strict=True)
    assert sum(s < e for s, e in zip(strict, expected, strict=True)) > 1000  # the texts do tell the two apart
    assert 2000 < sum(minimind_format(text) > 0 for text in texts) < 8000


@pytest.mark.timeout(10)
def test_the_layout_takes_linear_time():
    assert minimind_format("<think>\n" + "\n</think>\n<answer>\n" * 20_000) == 0.0


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        (" q ", "q"),
        ([{"role": "user", "content": [{"type": "text", "text": "q"}]}], "q"),
        (
            [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", " b "), ("user", "c"))],
            "user: a\nassistant: b\n以上是对话历史。我的新问题是：\nc",  # noqa: RUF001
        ),
    ],
)
def test_the_current_version_asks_the_reward_model_one_question(prompt, question):
    assert one_question(prompt) == question
