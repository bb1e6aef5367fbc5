"""What `hvdtrain bench input` reads: one worker and two read the same images."""

import numpy as np
import pytest

from hvdtrain.bench.input import KINDS, decoded, image, write_files
from hvdtrain.bench.measurement import Comparison, in_passes, interval, medians
from hvdtrain.data import from_files, make_source


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_hold_the_images(kind, tmp_path):
    write_files(tmp_path, kind, 20)
    read = image if kind == "png" else decoded
    files = from_files(f"{tmp_path}/*.{kind}", read)
    source = make_source(files, global_batch_size=8, shuffle=True, seed=0, threads=1)
    assert source.examples == 20
    one = np.concatenate([share.data for share in source.epoch(1, 0, 1)])
    halves = [list(source.epoch(1, rank, 2)) for rank in range(2)]
    two = np.concatenate([share.data for both in zip(*halves, strict=True) for share in both])
    np.testing.assert_array_equal(one, two)


def test_medians_are_of_each_figure_alone():
    assert Comparison(reference=100.0, measured=190.0).ratio == 1.9
    passes = [Comparison(10, 30), Comparison(30, 30), Comparison(20, 10)]
    assert medians(passes) == (20, 30, 1.0)


def test_bounds_of_the_median():
    # 95 % bounds in tables of the sign test: the 2nd and 9th of ten, the 6th and 15th of twenty. Of five, 93.75 %.
    assert interval(range(1, 6)) == (1, 5)
    assert interval(range(1, 11)) == (2, 9)
    assert interval(range(20, 0, -1)) == (6, 15)
    assert interval([3.0, 1.0]) == (1, 3)


def test_a_ratio_says_how_far_it_may_be_wrong():
    assert in_passes([0.5]) == "0.500"
    assert in_passes([0.5, 0.52]) == "0.510 (range 0.500 to 0.520)"
    assert in_passes([0.99, 1.0, 1.02, 0.98, 1.01]) == "1.000 (0.980 to 1.020)"
    assert in_passes([0.9, 1.0, 1.02, 0.98, 1.01]) == "1.000 (0.900 to 1.020; too noisy to tell)"
