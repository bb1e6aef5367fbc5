"""Which variables travel, and what no printed command may show."""

import pytest

from hvdtrain.launch.passing import looks_secret, masked, travelling


def test_only_the_named_set_and_what_was_asked_for_travels() -> None:
    environ = {
        "PATH": "/bin",
        "LC_ALL": "C.UTF-8",
        "NCCL_DEBUG": "INFO",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_VAR_region": "eu",  # Terraform's.
        "PYTHONPATH": "/code",
        "HVDTRAIN_LAUNCH_ID": "1",
        "AWS_PROFILE": "me",
        "DATA": "/data",
        "XDG_SESSION_ID": "7",
        "MYPATH": "/mine",
    }
    named = {"PATH", "LC_ALL", "NCCL_DEBUG", "PYTHONPATH", "HVDTRAIN_LAUNCH_ID"}
    named |= {"TF_CPP_MIN_LOG_LEVEL"}
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
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not looks_secret(name)


def test_a_url_with_a_password_is_secret() -> None:
    assert looks_secret("TRACKING", "https://me:hush@host:80/x")
    assert not looks_secret("TRACKING", "https://host:80/x@y")
    assert not looks_secret("TRACKING", "a:2,b:3")


def test_masked() -> None:
    command = [
        *("env", "API_KEY=abc", "A=1", "U=http://me:hush@h/x", "train.py", "--api-key", "abc"),
        *("--token=abc", "--epochs", "3", "-p", "x", "--password", "--next", "v", "db_pwd=abc"),
        *("--key=", "KEY", "a key"),
    ]
    assert masked(command) == [
        *("env", "API_KEY=***", "A=1", "U=http://me:***@h/x", "train.py", "--api-key", "***"),
        *("--token=***", "--epochs", "3", "-p", "x", "--password", "--next", "v", "db_pwd=***"),
        *("--key=***", "KEY", "a key"),
    ]
    assert "abc" not in " ".join(masked(command)) and "hush" not in " ".join(masked(command))
