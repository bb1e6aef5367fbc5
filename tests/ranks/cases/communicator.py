"""The communicator on Horovod."""

from __future__ import annotations

from typing import Any

import communication

from hvdtrain.collectives.communicator import ALL_RANKS


def case_collectives() -> list[str]:
    return communication.wrong(ALL_RANKS)


def case_constants() -> list[float]:
    return communication.of_constants(ALL_RANKS)


def case_exchange() -> list[Any]:
    mine = {"rank": ALL_RANKS.rank(), "text": "ä" * 300 * ALL_RANKS.rank()}
    return [ALL_RANKS.size(), ALL_RANKS.ranks, ALL_RANKS.exchange(mine, "facts")]
