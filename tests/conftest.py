"""What all tests have in common."""

from __future__ import annotations

from hypothesis import settings

# On a busy machine any example may take long once, which says nothing about the code.
settings.register_profile("unhurried", parent=settings(), deadline=None)
settings.load_profile("unhurried")
