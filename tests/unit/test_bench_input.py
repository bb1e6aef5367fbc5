"""What `hvdtrain bench input` reads: one worker and two read the same images."""

import numpy as np
import pytest

from hvdtrain.bench import input_rank
from hvdtrain.bench.input import KINDS, InputPass, write_files
from hvdtrain.data import from_files, make_source


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_hold_the_images(kind, tmp_path):
    write_files(tmp_path, kind, 20)
    read = input_rank.image if kind == "png" else input_rank.decoded
    files = from_files(f"{tmp_path}/*.{kind}", read)
    source = make_source(files, global_batch_size=8, shuffle=True, seed=0, threads=1)
    assert source.examples == 20
    one = np.concatenate([share.data for share in source.epoch(1, 0, 1)])
    halves = [list(source.epoch(1, rank, 2)) for rank in range(2)]
    two = np.concatenate([share.data for both in zip(*halves, strict=True) for share in both])
    np.testing.assert_array_equal(one, two)


def test_the_ratio():
    assert InputPass(alone=100.0, together=190.0).ratio == 1.9
