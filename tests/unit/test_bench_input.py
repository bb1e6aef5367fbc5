"""What `hvdtrain bench input` reads: one worker and two read the same images."""

import numpy as np
import pytest

from hvdtrain.bench.input import KINDS, decoded, image, write_files
from hvdtrain.bench.measurement import Comparison, medians
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
