"""A run that is stopped after any step and goes on elsewhere ends at the same bits and has logged the same figures."""

import pytest

from interrupted import CASES, check


@pytest.mark.parametrize("case", CASES)
def test_from_two_steps_to_the_same_bits(case, tmp_path):
    """Step 3 is inside of a generation, 5 in the second epoch, where the case has such."""
    check(case, tmp_path, (3, 5))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_from_every_step_to_the_same_bits(case, tmp_path):
    check(case, tmp_path, (1, 2, 4, 6, 7))
