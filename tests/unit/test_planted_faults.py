"""The planted faults fit the code as it is now. Whether tests find them: python tests/planted_faults.py"""

from __future__ import annotations

import pytest
from planted_faults import ROOT, Fault, read_faults


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.name)
def test_it_applies(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    path, _, name = fault.test.split()[0].partition("::")
    assert (ROOT / path).is_file()
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()
