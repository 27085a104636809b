"""TRL's environments get the rows of a generation: instances, tools and the prompts with their first observations."""

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


def observed(rows, prompts):
    environments = tool_environments.instances([None] * len(rows), {None: Room}, {None: []})
    return tool_environments.observed(rows, prompts, environments, several=False)


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
    [made] = observed([{"prompt": prompt, "seen": seen}], [prompt])
    assert made == said(read)
    assert prompt == said(content)


def test_a_row_without_a_prompt_begins_with_its_observation():
    made = observed([{"seen": "b"}, {}], [None, None])
    assert [prompt[-1]["content"] for prompt in made] == ["b", ""]


def test_each_row_has_an_instance_of_its_own_and_its_tools_and_instances_are_used_again():
    factories, pool = {"room": Room, "hall": Room}, {"room": [], "hall": []}
    rows = [{"environment": name, "n": n} for n, name in enumerate(("room", "hall", "room"))]

    def begun(rows):
        names = tool_environments.named(rows, factories, several=True)
        environments = tool_environments.instances(names, factories, pool)
        tool_environments.observed(rows, [said("a")] * 3, environments, several=True)
        return environments

    first = begun(rows)
    assert len({id(environment) for environment in first}) == 3
    assert [environment.row for environment in first] == [{"n": 0}, {"n": 1}, {"n": 2}]
    sync, waits = tool_environments.tools_by_row([add], first)
    assert [list(tools) for tools in sync] == [["add", "look"]] * 3
    assert [list(tools) for tools in waits] == [["walk"]] * 3
    assert sync[2]["look"].__self__ is first[2]
    assert {id(environment) for environment in begun(rows[::-1])} == {id(environment) for environment in first}


def test_an_unknown_environment_is_named():
    with pytest.raises(DataError, match=r"cellar.*not among the environments.*room, hall"):
        tool_environments.named([{"environment": "cellar"}], {"room": Room, "hall": Room}, several=True)
