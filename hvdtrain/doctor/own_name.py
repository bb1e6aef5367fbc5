"""Does this machine know its own name? Gloo's ranks crash where it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdtrain.doctor.finding import Finding, fail, ok

OWN_NAME = "own name"


def look_at_own_name(name: str, resolve: Callable[[str], object]) -> Sequence[Finding]:
    """One line.

    Args:
        name: this machine's host name.
        resolve: raises OSError for a name that has no address.
    """
    try:
        resolve(name)
    except OSError as error:
        why = error.strerror or error
        return [
            fail(
                OWN_NAME,
                f"{name} has no address ({why}): ranks over Gloo crash",
                f"add it to /etc/hosts: echo '127.0.0.1 {name}' | sudo tee -a /etc/hosts",
            )
        ]
    return [ok(OWN_NAME, f"{name} has an address")]
