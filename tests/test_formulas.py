"""docs/formulas.py: the formulas of the table of losses as TeX, from the text that `grpo-ext losses` prints."""

import re

import pytest

from formulas import mathematics, tex
from grpo_ext.objective.losses import losses


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ("(1/n_i) sum_it A l", r"\frac{1}{n_{i}} \sum_{i,t} A l"),
        ("clip(r, 1-eps_low, 5)", r"\operatorname{clip}(r, 1-\varepsilon_{\text{low}} , 5)"),
        ("s = (prod_t r_t)^(1/n)", r"s = (\prod_{t} r_{t} )^{1/n}"),
        ("e^lam S^2, |A| >= 0", r"e^{\lambda} S^2,\quad \lvert A\rvert \ge 0"),
        ("A, without micro-batches of the N", r"A,\quad \text{without micro-batches of the}\ N"),
        ("sum_{s>=t} KL_s / L_max", r"\sum_{s\ge t} \operatorname{KL}_{s} / L_{\text{max}}"),
    ],
)
def test_a_formula_as_tex(plain, expected):
    assert tex(plain) == expected


def test_definitions_follow_the_formula():
    assert mathematics("S A, S = r") == "$`S A`$, $`S = r`$"


KNOWN = r"frac sum prod min max log exp operatorname text lvert rvert ge quad varepsilon lambda beta delta phi pi tau"


@pytest.mark.parametrize("name", losses)
def test_every_formula_is_closed_and_of_known_commands(name):
    found = tex(losses[name].formula)
    assert set(re.findall(r"\\([a-z]+)", found)) <= set(KNOWN.split())
    assert all(found.count(a) == found.count(b) for a, b in ("{}", "()"))
    assert "|" not in found  # of a cell of a table
