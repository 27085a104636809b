"""TRL's environments get the rows of a generation: instances, tools and the prompts with their first observations."""

from types import SimpleNamespace

import pytest

from grpo_ext.errors import DataError
from grpo_ext.trainer import tool_environments


class Room:
    """Observes what its row says, and notes it."""

    def reset(self, **row):
        self.row = row
        return row.get("seen")

    def get_reward(self):
        return 0.0

    def look(self):
        """Look."""

    async def walk(self):
        """Walk."""

    def _hide(self):
        """Hide."""


def add():
    """Add."""


def trainer(several=False):
    names = ("room", "hall") if several else (None,)
    return SimpleNamespace(
        environment_factories=dict.fromkeys(names, Room),
        _environment_pool={name: [] for name in names},
        _multi_environment=several,
        _standalone_tools=[add],
        environments=None,
        tools=[add],
    )


def said(text):
    return [{"role": "system", "content": "s"}, {"role": "user", "content": text}]


TEXT, PART = "b", [{"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("content", "seen", "read"),
    [
        ("a", None, "a"),
        ("a", TEXT, "ab"),
        ("a", PART, [{"type": "text", "text": "a"}, *PART]),
        ([{"type": "text", "text": "a"}], TEXT, [{"type": "text", "text": "a"}, *PART]),
    ],
)
def test_an_observation_stands_behind_the_last_message(content, seen, read):
    prompt = said(content)
    [made] = tool_environments.begin(trainer(), [{"prompt": prompt, "seen": seen}], [prompt])
    assert made == said(read)
    assert prompt == said(content)


def test_a_row_without_a_prompt_begins_with_its_observation():
    made = tool_environments.begin(trainer(), [{"seen": "b"}, {}], [None, None])
    assert [prompt[-1]["content"] for prompt in made] == ["b", ""]


def test_each_row_has_an_instance_of_its_own_and_its_tools_and_instances_are_used_again():
    one, rows = (
        trainer(several=True),
        [{"environment": name, "n": n} for n, name in enumerate(("room", "hall", "room"))],
    )
    tool_environments.begin(one, rows, [said("a")] * 3)
    first = one.environments
    assert len({id(environment) for environment in first}) == 3
    assert [environment.row for environment in first] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [list(tools) for tools in one._sync_tool_dicts] == [["add", "look"]] * 3
    assert [list(tools) for tools in one._async_tool_dicts] == [["walk"]] * 3
    assert one._sync_tool_dicts[2]["look"].__self__ is first[2]
    tool_environments.begin(one, rows[::-1], [said("a")] * 3)
    assert {id(environment) for environment in one.environments} == {id(environment) for environment in first}


def test_an_unknown_environment_is_named():
    with pytest.raises(DataError, match=r"cellar.*not among the environments.*room, hall"):
        tool_environments.begin(trainer(several=True), [{"environment": "cellar"}], [said("a")])
