import math

import pytest

from venusrl.scheduling.lengths import Lengths
from venusrl.scheduling.protocol import LengthPredicted


def test_mates_before_everybody_before_nothing():
    lengths = Lengths()
    assert lengths.remaining("a", "g", 5) == 1.0
    lengths.finished("x", "other", 1000, 3000)
    assert lengths.remaining("a", "g", 100) == 900
    lengths.finished("b", "g", 400, 900)
    lengths.finished("c", "g", 600, 1500)
    assert lengths.remaining("a", "g", 100) == 400
    assert lengths.growth == (3000 + 900 + 1500) / 2000


def test_what_outlives_its_estimate_goes_on_for_a_share_of_its_age():
    lengths = Lengths()
    lengths.finished("b", "g", 400, 400)
    assert lengths.remaining("a", "g", 400) == 100
    assert lengths.remaining("a", "g", 4000) == 1000


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, -math.inf])
def test_a_prediction_that_is_no_length_is_ignored(value):
    lengths = Lengths()
    lengths.finished("b", "g", 400, 400)
    assert not lengths.observe(LengthPredicted(0.0, "a", value), 100)
    assert lengths.remaining("a", "g", 100) == 300


def test_a_prediction_counts_from_the_tokens_it_was_made_at():
    lengths = Lengths()
    assert lengths.observe(LengthPredicted(0.0, "a", 1000.0), 100)
    assert lengths.remaining("a", "g", 600) == 500
    lengths.forget("a")
    assert lengths.remaining("a", "g", 600) == 1.0


def test_predictions_are_not_used_where_they_are_not_wanted():
    lengths = Lengths(use_predictions=False)
    assert not lengths.observe(LengthPredicted(0.0, "a", 1000.0), 100)
