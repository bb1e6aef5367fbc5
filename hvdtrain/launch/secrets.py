"""Detect secret values: they never appear in a command line that is executed, and are masked in every command
that is printed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch.env_forwarding import EnvVar

MASK = "***"

# API_KEY, apiKey, HF_TOKEN and ACCESSTOKEN2 contain one of these words; MONKEY and COMPASS do not.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_SECRET_WORD = re.compile(
    r"(?:api|access|auth|private|secret|signing|encryption|session|db|pg)?"
    r"(?:key|token|secret|password|passwd|pwd|passphrase|pass|credential|auth|cookie)s?"
)
# Sizes and vocabulary of a language model: max_tokens, pad_token, tokens_per_batch.
_TOKEN = re.compile(r"tokens?")
_OF_TEXT = frozenset(
    {
        *("max", "min", "num", "n", "per"),
        *("pad", "bos", "eos", "unk", "cls", "sep", "mask", "special"),
    }
)
# A count, a size or a rate. Keys and tokens have more digits; a password may be as short.
_NUMBER = re.compile(r"[+-]?\d{1,9}(\.\d{0,9})?(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_PASSWORD = re.compile(r"(?:db|pg)?(?:pass(?:word|wd|phrase)?|pwd|secret)s?")
# https://user:password@host/...
_URL_WITH_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s]+(?=@)")
# https://token@host/... Most names of users are shorter. Storage has containers there: abfss://container@account/...
_URL_WITH_TOKEN = re.compile(r"(https?://)[^/\s:@?#]{10,}(?=@)")
# https://host/...?token=value&...
_PARAMETER = re.compile(r"(?P<head>[?&](?P<name>[\w.-]+)=)(?P<value>[^&#\s]+)")
# A single letter such as -p does not hint at its value; -password does, like --password.
_OPTION = re.compile(r"--?(?P<name>[^-=][^=]+)", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?P<head>[-+~]{0,2}(?P<name>[A-Za-z_][\w.-]*)=)(?P<value>.*)", re.DOTALL)
# The values of these are paths, or public.
_HARMLESS = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "ssh-identity-file"})


def looks_secret(name: str, value: str = "") -> bool:
    """Return whether the value of a variable or option with this name should be hidden.

    A name that may be a secret's (`--key`) counts as one: a value once shown cannot be taken back, while a
    masked one is easily typed again.
    """
    return name not in _HARMLESS and (_is_secrets(name, value) or _masked_urls(value) != value)


def _is_secrets(name: str, value: str) -> bool:
    """Return whether the name is that of a secret, given its value."""
    if name in _HARMLESS:
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    secret = [word for word in words if _SECRET_WORD.fullmatch(word)]
    if _OF_TEXT.intersection(words):
        secret = [word for word in secret if not _TOKEN.fullmatch(word)]
    if _NUMBER.fullmatch(value):
        secret = [word for word in secret if _PASSWORD.fullmatch(word)]
    return bool(secret)


def secret_values(variables: Iterable[EnvVar]) -> dict[str, str]:
    """Return the variables whose value is given and secret, by name."""
    given = {one.name: one.value for one in variables if one.value is not None}
    return {name: value for name, value in given.items() if looks_secret(name, value)}


def variable_to_pass(variable: EnvVar) -> EnvVar:
    """Move a secret's value to this process's environment, to keep it out of the command.

    Raises:
        UsageError: The variable has no value.
    """
    if variable.value is None and variable.name not in os.environ:
        raise UsageError(
            f"--env {variable.name}: not set in this environment: set it, or use "
            f"--env {variable.name}=VALUE"
        )
    secret = secret_values([variable])
    os.environ.update(secret)
    return replace(variable, value=None) if secret else variable


def masked(argv: Sequence[str]) -> list[str]:
    """Return the command with secrets replaced by `***`, for printing: the values in `NAME=VALUE`, `--name=VALUE`,
    `--name VALUE` and URLs, also within a word that contains several (`--mpi-args="-x NAME=VALUE"`)."""
    shown: list[str] = []
    option = ""
    for argument in argv:
        secret = option and not argument.startswith("--") and _is_secrets(option, argument)
        shown.append(MASK if secret else _masked_word(argument))
        found = _OPTION.fullmatch(argument)
        option = found["name"] if found else ""
    return shown


def _masked_word(text: str) -> str:
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment and _is_secrets(assignment["name"], assignment["value"]):
        return assignment["head"] + MASK
    if assignment:
        return assignment["head"] + _masked_word(assignment["value"])
    return _masked_words(_masked_urls(text))


def _masked_words(text: str) -> str:
    """Mask the secrets in a value that may contain several words."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    shown = masked(words) if len(words) > 1 else words
    return text if shown == words else shlex.join(shown)


def _masked_urls(text: str) -> str:
    """Mask passwords and tokens before the host in URLs, and secret values among their parameters."""
    for secret in (_URL_WITH_PASSWORD, _URL_WITH_TOKEN):
        text = secret.sub(rf"\g<1>{MASK}", text)
    return _PARAMETER.sub(
        lambda found: (
            found["head"] + MASK if _is_secrets(found["name"], found["value"]) else found[0]
        ),
        text,
    )
