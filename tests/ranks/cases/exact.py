"""One case of the table of what is exact (tests/exactness), which comes as JSON in TEST_EXACT."""

from __future__ import annotations

import json
import os
from typing import Any

from exactness.case import Case
from exactness.training import by_keras, by_trainer


def case_keras() -> dict[str, Any]:
    return by_keras(_case())


def case_trainer() -> dict[str, Any]:
    return by_trainer(_case())


def _case() -> Case:
    given = json.loads(os.environ["TEST_EXACT"])
    return Case(**given | {"layers": tuple(given["layers"])})
