"""Which variables travel, and what no printed command may show."""

import shlex
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.launch.env_forwarding import into_container, travelling
from hvdtrain.launch.secrets import MASK, looks_secret, masked


def test_only_the_named_set_and_what_was_asked_for_travels() -> None:
    environ = {
        "PATH": "/bin",
        "LC_ALL": "C.UTF-8",
        "NCCL_DEBUG": "INFO",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_VAR_region": "eu",  # Terraform's.
        "PYTHONPATH": "/code",
        "HVDTRAIN_LAUNCH_ID": "1",
        "HVDTRAIN_STRATEGY": "horovod",
        "HVDTRAIN_ENV": "API_KEY=abc",  # An option of the launcher.
        "HVDTRAIN_MPI_ARGS": "-x API_KEY=abc",
        "AWS_PROFILE": "me",
        "DATA": "/data",
        "XDG_SESSION_ID": "7",
        "MYPATH": "/mine",
    }
    named = {"PATH", "LC_ALL", "NCCL_DEBUG", "PYTHONPATH", "HVDTRAIN_LAUNCH_ID"}
    named |= {"TF_CPP_MIN_LOG_LEVEL", "HVDTRAIN_STRATEGY"}
    assert set(travelling(environ, ())) == named
    assert set(travelling(environ, ("DATA", "ABSENT"))) == named | {"DATA"}
    assert travelling(environ, ("DATA",))["DATA"] == "/data"


@pytest.mark.parametrize(
    "name",
    [
        *("API_KEY", "APIKEY", "WANDB_API_KEY", "apikey", "api-key", "key", "HF_TOKEN", "token"),
        *("AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "db_passwd", "PGPASS", "MYSQL_PWD", "Passphrase"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "SECRETS", "GITHUB_AUTH", "SESSION_COOKIE", "keys"),
        *("ACCESSTOKEN", "PGPASSWORD", "apiKey", "accessToken", "KEY1", "OPENAI_KEY_2"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("MONKEY", "KEYBOARD", "PATH", "PWD", "OLDPWD", "AUTHOR", "NCCL_DEBUG", "epochs"),
        *("SSH_AUTH_SOCK", "tokenizer", "COMPASS", "KERAS_BACKEND", "keyframes", "BYPASSED"),
        *(
            "MAX_TOKENS",
            "max-new-tokens",
            "num_tokens",
            "pad_token",
            "tokens_per_batch",
            "maxTokens",
        ),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not looks_secret(name)


def test_a_short_number_is_a_size_and_no_key() -> None:
    for value in ("512", "-1", "0.5", "1e-4"):
        assert not looks_secret("key_dim", value)
        assert looks_secret("DB_PASSWORD", value)
    assert looks_secret("API_KEY", "12345678901")
    assert looks_secret("MAX_API_KEY")


def test_a_url_with_a_password_is_secret() -> None:
    assert looks_secret("TRACKING", "https://me:hush@host:80/x")
    assert looks_secret("TRACKING", "https://ghp_abcdef@github.com/o/r")
    assert not looks_secret("TRACKING", "ssh://git@github.com/o/r")
    assert not looks_secret("TRACKING", "https://host:80/x@y")
    assert not looks_secret("DATA", "abfss://training-data@account.dfs.core.windows.net/x")
    assert not looks_secret("PAGE", "https://example.com?mail=somebody@example.com")
    assert not looks_secret("TRACKING", "a:2,b:3")


# Words that no shell takes apart are quoted as they are.
QUOTED = shlex.join(["it's", "--key", MASK])


def test_masked() -> None:
    command = [
        *("env", "API_KEY=abc", "A=1", "U=http://me:hush@h/x", "train.py", "--api-key", "abc"),
        *("--token=abc", "--epochs", "3", "-p", "x", "--password", "--next", "v", "db_pwd=abc"),
        *("--key=", "KEY", "a key", "--max-tokens", "512", "--key", "label", "--keys=3"),
        *("--mpi-args=-x API_KEY=abc -v", "-x 'A B' db_pwd=abc", "it's --key abc"),
    ]
    assert masked(command) == [
        *("env", "API_KEY=***", "A=1", "U=http://me:***@h/x", "train.py", "--api-key", "***"),
        *("--token=***", "--epochs", "3", "-p", "x", "--password", "--next", "v", "db_pwd=***"),
        *("--key=***", "KEY", "a key", "--max-tokens", "512", "--key", "***", "--keys=3"),
        *("--mpi-args=-x 'API_KEY=***' -v", "-x 'A B' 'db_pwd=***'", QUOTED),
    ]


# As documented for us, horovodrun, mpirun, docker, argparse and Hydra.
SPELLINGS: dict[str, Callable[[str], list[str]]] = {
    "--name VALUE": lambda value: ["--password", value],
    "--name=VALUE": lambda value: [f"--api-key={value}"],
    "-name VALUE": lambda value: ["-token", value],
    "-name=VALUE": lambda value: [f"-token={value}"],
    "NAME=VALUE": lambda value: ["env", f"API_KEY={value}", "python"],
    "--env NAME=VALUE": lambda value: ["--env", f"API_KEY={value}"],
    "--env=NAME=VALUE": lambda value: [f"--env=API_KEY={value}"],
    "-e NAME=VALUE": lambda value: ["-e", f"API_KEY={value}"],
    "-eNAME=VALUE": lambda value: [f"-eAPI_KEY={value}"],
    "-x NAME=VALUE": lambda value: ["-x", f"API_KEY={value}"],
    "+name=VALUE": lambda value: [f"+trainer.api_key={value}"],
    "words in a value": lambda value: [f"--mpi-args=-v -x API_KEY={shlex.quote(value)}"],
    "words in a word": lambda value: ["--mpi-args", f"-x API_KEY={shlex.quote(value)} -v"],
    "a word for a shell": lambda value: ["ssh", "a", shlex.join(["cd", "/a b", "--token", value])],
    "a shell in a shell": lambda value: [
        shlex.join(["sh", "-c", shlex.join(["env", "A=1", f"A_KEY={value}", "x"])])
    ],
    "a URL": lambda value: [f"--image=https://me:{quote(value, safe='@:')}@host/x"],
    "a URL's parameter": lambda value: ["--track", f"https://host/x?a=b&token={quote(value)}#y"],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_secret_value_is_never_printed(spelling: str, text: str) -> None:
    value = f"hush{text}hush"
    shown = shlex.join(masked(SPELLINGS[spelling](value)))
    assert "hush" not in shown and MASK in shown


def test_what_goes_into_a_container() -> None:
    """What means the same there: no folders, devices or locale of this machine."""
    there = {"HVDTRAIN_NP", "OMP_NUM_THREADS", "NCCL_DEBUG", "TF_CPP_MIN_LOG_LEVEL", "MINE"}
    others = {
        "PYTHONPATH",
        "CUDA_VISIBLE_DEVICES",
        "PATH",
        "TFDS_DATA_DIR",
        "HVDTRAIN_LOG_DIR",
        "TF_VAR_x",
    }
    assert set(into_container(dict.fromkeys(there | others, "1"), ["MINE"])) == there
    for elsewhere in (there - {"HVDTRAIN_NP"}, {"PYTHONPATH", "CUDA_VISIBLE_DEVICES", "PATH"}):
        assert set(travelling(dict.fromkeys(elsewhere, "1"), ["MINE"])) == elsewhere
