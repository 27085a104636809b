"""A trajectory: the turns of one episode of one prompt, as one row of a batch.

A turn is a context, the ids that the policy read, and the ids that it sampled after them. Contexts usually extend each
other; where one is rewritten (thinking stripped, history summarised, a sub-agent) a trajectory has several plain rows
with common prefixes. Its tokens then form a tree that has each token once: the first context is the prompt, all others
follow in the order of the turns, each with its parent. A sampled token is trained once, where it was sampled; where a
later context repeats it, it is context. Everything is token ids, as they were sampled; text is never re-tokenised.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

COLUMN = "trajectory"
"""Column in which reward functions find a row's `Trajectory`."""
BRANCHES = "branches"
"""Column of tables of completions with `Trajectory.branches`."""
OUTPUT = "output"
"""Column of tables of completions with `Trajectory.output`."""


class Sample(NamedTuple):
    """Tokens that the policy sampled in one turn, and their log-probabilities where they are known."""

    ids: list[int]
    logprobs: list[float | None] | None
    support: "Tensor | None" = None
    """The sampling support of each token, as in `packing.sampling_support`; None where the loss needs none."""


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A turn to be sampled: the unit of an engine. One episode may have several at a time."""

    context: list[int]
    """All ids that the policy reads."""
    limit: int
    """Most tokens to sample."""
    episode: int
    """Number of its episode in the generation, whose random numbers it takes."""


@dataclass(frozen=True)
class Turn:
    """One call of the policy."""

    context: list[int]
    """All ids that it read."""
    sampled: list[int]
    logprobs: list[float | None] | None = None
    """Log-probability of each sampled id when it was sampled; None where the sampler does not report it."""
    version: int = 0
    """Version of the weights that sampled it."""
    reward: float | None = None
    """Reward of this turn, where the environment rewards turns."""
    state: Hashable = None
    """State of the environment at the turn; None: the ids that the context added since the turn that it extends.

    Where a context was rewritten these include the history, so that no two states are equal.
    """
    support: "Tensor | None" = field(default=None, compare=False, repr=False)
    """That of `Sample`, for the sampled ids at least. A pickled turn has none: a batch holds those of its rows."""
    images: list[Any] = field(default_factory=list, compare=False, repr=False)
    """The images among the ids of the context, in order; each turn's context then extends the one before."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "support": None}

    def __post_init__(self) -> None:
        """Raise if the turn cannot be trained."""
        if not self.context:
            raise ValueError("a turn without a context: the policy's first token must follow some id. Give its ids.")
        if self.logprobs is not None and len(self.logprobs) != len(self.sampled):
            raise ValueError(
                f"a turn with {len(self.sampled)} sampled ids and {len(self.logprobs)} log-probabilities: "
                "give one for each, or None for all."
            )


@dataclass(frozen=True)
class Trajectory:
    """Turns in the order of sampling, at least one; if the first failed, its `sampled` is empty."""

    turns: list[Turn]
    reward: float | None = None
    """Reward of the whole trajectory, beside those of its turns."""
    truncated: bool = False
    """True if a limit, a deadline or a failure cut it."""
    failure: str | None = None
    environment: str = ""
    messages: list = field(default_factory=list)
    """Messages after the prompt, as a reward function gets them."""
    opening: list = field(default_factory=list)
    """The prompt as the policy read it, where an environment has added to the dataset's or replaced it."""
    branches: str = ""
    """Conversations of an agent that `messages` does not have, as text: sub-agents, what it took back."""
    output: str = ""
    """The end of the output of an agent's program, for people."""
    status: int | None = None
    """The exit status of an agent's program."""

    def __post_init__(self) -> None:
        """Raise if there is no prompt."""
        if not self.turns:
            raise ValueError(
                "a trajectory without a turn: it has no prompt. Give it one turn with the prompt's ids as its context "
                "and an empty list of sampled ids."
            )

    @property
    def lost(self) -> bool:
        """True if rewards must not score it: it failed, and no reward was set for that."""
        return self.failure is not None and self.reward is None

    @cached_property
    def tree(self) -> "Tree":
        """The tree of its tokens."""
        return _tree(self.turns)

    def rows(self) -> list[list[int]]:
        """Return its plain rows: one for each turn that no other turn's context extends."""
        tree = self.tree
        return [
            tree.prompt[:kept] + [tree.ids[i] for i in path] for kept, path in paths(tree.parents, len(tree.prompt))
        ]


def of_agents(trajectories: Sequence[Trajectory]) -> dict[str, list[str]]:
    """Return what only agents have: conversations besides the last one, and the end of their programs' output."""
    return {BRANCHES: [one.branches for one in trajectories], OUTPUT: [one.output for one in trajectories]}


@dataclass(frozen=True)
class Tree:
    """Tokens of a trajectory, each once, a parent before its children."""

    prompt: list[int]
    """The first context."""
    ids: list[int]
    """All others, in the order of the turns."""
    parents: list[int]
    """Index of each token's parent in `ids`; negative indices count from the end of the prompt (-1 = its last token).

    -len(prompt) - 1 is the root, before the prompt: a context that shares no prefix with the prompt begins there.
    """
    turns: list[int]
    """The turn that sampled it, or -1."""
    logprobs: list[float | None]
    """0 for a token that was not sampled."""
    states: list[Hashable]
    """State of each turn."""


def _tree(turns: Sequence[Turn]) -> Tree:
    """Build the tree in which each context follows the first turn with the longest common prefix.

    Each token of the tree belongs to some turn, so no other path of the tree has a longer common prefix. The time is
    about linear in the length of all contexts together.
    """
    prompt = turns[0].context
    tree = Tree(prompt, [], [], [], [], [])
    root = _Segment([], [], {})
    _add(root, 0, prompt, list(range(-len(prompt), 0)))
    for number, turn in enumerate(turns):
        segment, used, shared = _follow(root, 0, turn.context)
        news, first = turn.context[shared:], len(tree.ids)
        rest = news + turn.sampled
        places = list(range(first, first + len(rest)))
        tree.parents.extend([segment.places[used - 1] if shared else -len(prompt) - 1, *places][: len(rest)])
        tree.ids.extend(rest)
        tree.turns.extend([-1] * len(news) + [number] * len(turn.sampled))
        tree.logprobs.extend([0.0] * len(news))
        tree.logprobs.extend(turn.logprobs if turn.logprobs is not None else [None] * len(turn.sampled))
        tree.states.append(turn.state if turn.state is not None else tuple(news if number else prompt))
        segment, used, again = _follow(segment, used, rest)  # sampled before: contexts follow the first
        _add(segment, used, rest[again:], places[again:])
    return tree


@dataclass
class _Segment:
    """Node of a prefix tree of contexts and sampled ids: a run of tokens without a branch."""

    tokens: list[int]
    places: list[int]
    """Places of the tokens in the `Tree`."""
    behind: dict[int, "_Segment"]
    """Next segments, by their first token."""


def _follow(segment: _Segment, used: int, ids: list[int]) -> tuple[_Segment, int, int]:
    """Walk along `ids` from behind `used` tokens of a segment: where the walk ends, and how many ids it took."""
    taken = 0
    while taken < len(ids):
        if used == len(segment.tokens):
            if ids[taken] not in segment.behind:
                break
            segment, used = segment.behind[ids[taken]], 0
        left = len(segment.tokens) - used
        alike = common(segment.tokens[used:], ids[taken : taken + left])
        taken, used = taken + alike, used + alike
        if alike < left:
            break
    return segment, used, taken


def _add(segment: _Segment, used: int, ids: list[int], places: list[int]) -> None:
    """Insert `ids` after `used` tokens of a segment, where no branch begins with the first of them yet."""
    if used < len(segment.tokens) and ids:
        tail = _Segment(segment.tokens[used:], segment.places[used:], segment.behind)
        segment.tokens, segment.places = segment.tokens[:used], segment.places[:used]
        segment.behind = {tail.tokens[0]: tail}
    elif segment.tokens and not segment.behind:
        segment.tokens.extend(ids)
        segment.places.extend(places)
        return
    if ids:
        segment.behind[ids[0]] = _Segment(list(ids), list(places), {})


def common(one: list[Any], other: list[Any]) -> int:
    """Return the length of the common prefix of two lists."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # alike up to `low`, not up to `high`
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def paths(parents: Sequence[int], prompt: int) -> list[tuple[int, list[int]]]:
    """Return the path to each leaf: the number of tokens of the prompt, then the indices of the others."""
    inner = set(parents)
    paths = []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while (place := parents[path[-1]]) >= 0:
                path.append(place)
            paths.append((prompt + 1 + place, path[::-1]))
    return paths or [(prompt, [])]


@dataclass(frozen=True)
class Rows:
    """Trajectories as the rows of TRL's batch, one for each."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]]
    """1 for a token that the policy sampled."""
    logprobs: list[list[float | None]] | None


def known(trajectories: Sequence[Trajectory]) -> bool | None:
    """Return whether the sampler reported all log-probabilities; None if it sampled no token."""
    sampled = [turn for trajectory in trajectories for turn in trajectory.turns if turn.sampled]
    return all(turn.logprobs is not None for turn in sampled) if sampled else None


def batch(trajectories: Sequence[Trajectory], ends: Collection[int], logprobs: bool | None = None) -> Rows:
    """Return the rows of a batch; a row ends with one of `ends` exactly if it was not cut, as TRL expects.

    Where that does not hold, or the completion is empty, an untrained token is appended. The rows have
    log-probabilities if `logprobs`, or if they are `known`.
    """
    trees = [trajectory.tree for trajectory in trajectories]
    closing = [_closing(trajectory, ends) for trajectory in trajectories]
    both = list(zip(trees, closing, strict=True))
    logprobs = known(trajectories) if logprobs is None else logprobs
    return Rows(
        prompt_ids=[list(tree.prompt) for tree in trees],
        completion_ids=[tree.ids + more for tree, more in both],
        tool_mask=[[int(turn >= 0) for turn in tree.turns] + [0] * len(more) for tree, more in both],
        logprobs=[tree.logprobs + [0.0] * len(more) for tree, more in both] if logprobs else None,
    )


def _closing(trajectory: Trajectory, ends: Collection[int]) -> list[int]:
    ids = trajectory.tree.ids
    if ids and (ids[-1] in ends) is not trajectory.truncated:
        return []
    return [next(i for i in count() if (i in ends) is not trajectory.truncated)]
