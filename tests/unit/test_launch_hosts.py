"""Hosts and hostfiles: what can be written is read back; what cannot be read is named with its
place."""

from pathlib import Path

import pytest
from horovod.runner.common.util import hosts as horovod_hosts
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host, parse_hosts, read_hostfile

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)
HOSTS = st.lists(
    st.builds(Host, NAMES, st.integers(1, 10_000)), min_size=1, unique_by=lambda host: host.name
).map(tuple)
COMMENTS = st.sampled_from(["", "# rack 7", "   ", "#", "\t# a slots=9"])
LIMITS = st.sampled_from(["", " max_slots=64", "\tmax-slots = 9", " # slots=7", "#"])
SPACES = st.sampled_from(["", " ", "  ", "\t"])


@given(HOSTS, SPACES)
def test_written_hosts_are_read_back(hosts: tuple[Host, ...], space: str) -> None:
    assert parse_hosts(f"{space},{space}".join(map(str, hosts))) == hosts


@given(HOSTS)
def test_horovod_reads_the_same(hosts: tuple[Host, ...]) -> None:
    names, slots = horovod_hosts.parse_hosts_and_slots(",".join(map(str, hosts)))
    assert tuple(Host(name, slots[name]) for name in names) == hosts


@given(hosts=HOSTS, data=st.data())
def test_written_hostfiles_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, hosts: tuple[Host, ...], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("hosts") / "hostfile"
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    lines = []
    for host in hosts:
        lines += data.draw(st.lists(COMMENTS, max_size=2))
        before, between, limit = data.draw(SPACES), data.draw(SPACES), data.draw(LIMITS)
        lines.append(f"{before}{host.name} slots{between}={between}{host.slots}{limit}")
    path.write_bytes(end.join([*lines, ""]).encode())
    assert read_hostfile(path) == hosts


@given(content=st.one_of(st.binary(), st.text("ab :=#\n\t19sltomax_\u2028").map(str.encode)))
def test_any_hostfile_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    try:
        hosts = read_hostfile(path)
    except UsageError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)
    else:
        assert hosts
        assert parse_hosts(",".join(map(str, hosts))) == hosts


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except UsageError as error:
        assert "\n" not in str(error).replace(text, "")
    else:
        assert all(host.slots >= 1 for host in hosts)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("node1", "'node1'"),
        ("node1:2,", "''"),
        ("node1:0", "0 slots"),
        ("node1:1000000000", "1000000000 slots: at most 1000000"),
        ("node1:two", "node1:two"),
        ("fe80::1:2", "fe80::1:2"),
        ("-x:2", "'-x'"),
        ("a;b:2", "'a;b'"),
        ("a:1,b:2,a:3", "a is named twice"),
        ("a:" + "9" * 5000, "cannot read"),
    ],
)
def test_wrong_hosts_are_named(text: str, what: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hosts(text)
    assert what in str(error.value)


def test_max_slots_of_open_mpi_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("node1 slots=2 max_slots=4\r\n\nnode2 slots=3 max-slots=3\n")
    assert read_hostfile(path) == (Host("node1", 2), Host("node2", 3))


@pytest.mark.parametrize(
    "line", ["node1", "node1 slots=x", "node1:2", "node1 slots=0", "a slots=1"]
)
def test_a_wrong_line_is_named_with_file_and_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hostfile"
    path.write_text(f"# ours\na slots=1\n{line}\n")
    with pytest.raises(UsageError, match=r"hostfile, line 3: "):
        read_hostfile(path)


def test_unreadable_hostfiles(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot read the hostfile"):
        read_hostfile(tmp_path)
    (tmp_path / "empty").write_text("# nothing\n\n")
    with pytest.raises(UsageError, match="names no hosts"):
        read_hostfile(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        read_hostfile(tmp_path / "binary")
