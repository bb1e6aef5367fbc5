"""Why a host cannot run ranks, in one message that names it; and the interface that all share."""

from dataclasses import asdict, replace

import pytest

from hvdtrain.launch.host_report import (
    THIS_HOST,
    HostReport,
    common_interface,
    differences,
    loopback_interfaces,
    missing_interfaces,
    report_of,
    ssh_problem,
)

HERE = HostReport("1.0", "3.11.7", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]})
THERE = replace(
    HERE,
    interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "down0": []},
    reached="10.0.0.2",
    origin="10.0.0.1",
)


def test_a_report_of_another_version_may_tell_more() -> None:
    assert report_of({**asdict(THERE), "gpus": 8}) == THERE


@pytest.mark.parametrize(
    ("exit_code", "stderr", "expected"),
    [
        (255, "ssh: Could not resolve hostname a: Name or service not known", "its name cannot be resolved"),
        (255, "u@a: Permission denied (publickey).", "refuses your ssh key (u@a: Permission"),
        (255, "Host key verification failed.", "log in once by hand: ssh a"),
        (255, "ssh: connect to host a port 22: Connection refused", "start sshd"),
        (255, "ssh: connect to host a port 22: Connection timed out", "cannot be reached"),
        (255, "ssh: connect to host a port 22: No route to host", "cannot be reached"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key for a has changed and "
            "you have requested strict checking.\nHost key verification failed.",
            "its host key has changed (Host key for a has changed and you have requested"),
        (255, "Warning: Identity file k not accessible: No such file or directory.\nu@a: Permission "
            "denied (publickey).", "the identity file does not exist"),
        (255, "kex_exchange_identification: bad", "ssh failed: kex_exchange_identification: bad"),
        (255, "", "ssh failed: no output"),
        (-9, "", "the local ssh process connected to it was ended by SIGKILL"),
        (127, "env: '/v/python': No such file or directory", "there is no Python at /v/python"),
        (127, "bash: line 1: env: command not found", "there is no Python at /v/python"),
        (1, "/v/python: Error while finding module specification\nModuleNotFoundError: "
            "No module named 'hvdtrain'", "/v/python has no module hvdtrain there"),
        (1, "Traceback:\nHvdtrainError: cannot keep", "failed there: HvdtrainError: cannot keep"),
    ],
)  # fmt: skip
def test_what_ssh_says_and_means(exit_code: int, stderr: str, expected: str) -> None:
    problem = ssh_problem("a", exit_code, stderr, "/v/python")
    assert problem.startswith("host a: ")
    assert expected in problem
    assert "\n" not in problem


def test_versions_must_agree() -> None:
    assert differences("b", THERE, HERE) == ""
    assert differences("b", replace(THERE, python="3.11.9"), HERE) == ""
    assert "host b has hvdtrain 0.9, this host has 1.0" in differences(
        "b", replace(THERE, hvdtrain="0.9"), HERE
    )
    assert "host b has Python 3.12.7, this host has 3.11.7" in differences(
        "b", replace(THERE, python="3.12.7"), HERE
    )


def test_interfaces_that_a_host_lacks() -> None:
    reports = {"a": HERE, "b": THERE}
    assert missing_interfaces(["eth0"], reports) == ""
    assert missing_interfaces(["eth0", "ib0"], reports) == ""
    wrong = missing_interfaces(["ib0"], reports)
    assert wrong.startswith("host b has no network interface ib0: it has down0, eth0\n")
    assert "host a" not in wrong
    own = missing_interfaces(["ib1"], {THIS_HOST: HERE})
    assert own.startswith("this host has no network interface ib1: it has eth0, ib0\n")
    assert missing_interfaces(["down0"], reports).count("has no network interface down0") == 2


def test_the_interface_that_ssh_uses_everywhere() -> None:
    assert common_interface(HERE, [THERE, THERE]) == "eth0"
    renamed = replace(THERE, interfaces={"ens3": ["10.0.0.2"]})
    assert common_interface(HERE, [THERE, renamed]) == ""


def test_the_only_interface_that_all_hosts_have() -> None:
    """Where ssh does not tell: through a gateway that translates addresses, or over another network on some hosts."""
    for unknown in ({"reached": "172.17.0.2"}, {"origin": "172.17.0.2"}, {"reached": ""}):
        assert common_interface(HERE, [replace(THERE, **unknown)]) == "eth0"
    two = replace(THERE, reached="", interfaces={"eth0": ["10.0.0.2"], "ib0": ["10.1.0.2"]})
    assert common_interface(HERE, [two]) == "", "one of two is for the user to choose"
    bridge = replace(HERE, interfaces={"docker0": ["172.17.0.1"], "lo": ["127.0.0.1"]})
    assert common_interface(bridge, [replace(bridge, reached="")]) == "", "the same address on each"


def test_the_loopback() -> None:
    assert loopback_interfaces(HERE) == {"lo"}
