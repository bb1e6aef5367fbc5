"""The ranks' mixed, tagged output, taken apart and shown."""

import errno
import io
import resource
from pathlib import Path

import pytest
from terminal import Terminal

from hvdtrain.launch.running.log_filter import is_noise, without_noise, without_stamp
from hvdtrain.launch.running.output import Output
from hvdtrain.launch.running.output_writers import LogFiles
from hvdtrain.launch.running.process_names import ALONE, ProcessNames
from hvdtrain.start.parts.output_tags import marked
from hvdtrain.worker.failure_report import LONGEST_TEXT, Failure, from_line


def test_rank_0_looks_as_if_it_ran_alone(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path).run(b"[0]<stdout>:one\n[1]<stdout>:other\n[0]<stdout>:\rtwo")
    assert terminal.out.getvalue() == b"one\n\rtwo"
    assert terminal.logged("rank.0/stdout") == b"one\n\rtwo"
    assert terminal.logged("rank.1/stdout") == b"other\n"


def test_all_ranks(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, all_ranks=True).run(
        b"[1,0]<stdout>:one\n[1,1]<stdout>:oth[1,0]<stdout>:two\n[1,1]<stdout>:er",
        b"[1,1]<stderr>:careful\n[1,1]<stderr>:I0000 00:00:1 2 port.cc:1] oneDNN custom operations are on\n",
    )
    assert terminal.out.getvalue() == b"[0] one\n[0] two\n[1] other\n"
    assert terminal.err.getvalue() == b"[1] careful\n"


def test_warnings_of_several_ranks_are_shown_once(tmp_path: Path) -> None:
    line = b"x.py:3: UserWarning: slow\n  warn()\n"
    stderr = b"".join(
        b"[%d]<stderr>:%s" % (rank, part)
        for rank in (1, 0, 2)
        for part in line.splitlines(keepends=True)
    )
    terminal = Terminal(tmp_path).run(stderr=stderr + b"[2]<stderr>:mine only\n")
    assert terminal.err.getvalue() == (
        b"[1] x.py:3: UserWarning: slow\n[1]   warn()\n[2] mine only\n"
    )
    assert terminal.logged("rank.2/stderr") == line + b"mine only\n"


@pytest.mark.parametrize("first", [0, 1])
def test_empty_lines_go_with_the_text(tmp_path: Path, first: int) -> None:
    text = b"careful:\n\n    do this\n\n"
    stderr = marked(text, first, 2) + marked(text, 1 - first, 2)
    shown = b"[1] careful:\n[1]     do this\n" if first else text
    assert Terminal(tmp_path).run(stderr=stderr).err.getvalue() == shown


def test_rank_0_may_repeat_itself(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path).run(
        stderr=b"[0]<stderr>:again\n" * 3 + b"[1]<stderr>:again\n" * 3
    )
    assert terminal.err.getvalue() == b"again\n" * 3


def test_unfinished_lines_come_through(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    with terminal.output as output:
        output.feed("stdout", b"[1,0]<stdout>:1/5 [")
        output.feed("stderr", b"[1,0]<stderr>: 10%|=")
        output.settle()
        assert terminal.out.getvalue() == b"1/5 ["
        assert terminal.err.getvalue() == b" 10%|="
        output.feed("stderr", b"[1,0]<stderr>:==\r[1,0]<stderr>: 20%")
        output.finish()
    assert terminal.err.getvalue() == b" 10%|===\r 20%"


@pytest.mark.parametrize("one_terminal", [False, True])
def test_what_others_say_is_not_behind_an_unfinished_line(
    tmp_path: Path, one_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(tmp_path)
    for stream in (terminal.out, terminal.err):
        monkeypatch.setattr(stream, "isatty", lambda: one_terminal, raising=False)
    terminal.output = Output(tmp_path, terminal.out, terminal.err)
    with terminal.output as output:
        output.feed("stderr", b"[1,0]<stderr>: 10%")
        output.settle()
        output.feed("stderr", b"[1,1]<stderr>:careful\n[1,0]<stderr>: 20%\n")
        output.say("rank 1 ended")
        output.feed("stdout", b"[1,0]<stdout>:1/5 [")
        output.say("rank 0 ended")
        output.finish()
    apart = b"\n" if one_terminal else b""
    said = b" 10%\n[1] careful\n 20%\nrank 1 ended\n" + apart + b"rank 0 ended\n"
    assert terminal.err.getvalue() == said


def test_a_failure_is_taken_from_the_stream(tmp_path: Path) -> None:
    failure = Failure(1, 1, False, "Traceback\n  [1,0]<stdout>: é\nE: x")
    line = failure.to_line().encode()
    stderr = (
        b"[1,1]<stderr>:" + line[:40] + b"[1,0]<stderr>:fine\n[1,1]<stderr>:" + line[40:] + b"\n"
    )
    terminal = Terminal(tmp_path).run(stderr=stderr)
    assert terminal.output.failures == [failure]
    assert terminal.err.getvalue() == b"fine\n"
    assert terminal.logged("rank.1/stderr").decode() == failure.text + "\n"


def test_the_launchers_words_are_kept_apart(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path).run(b"Process 1 exit\n", b"mpirun noticed\n")
    assert (terminal.out.getvalue(), terminal.err.getvalue()) == (b"", b"")
    assert terminal.logged("launcher.log") == b"Process 1 exit\nmpirun noticed\n"
    assert terminal.output.launcher_text == b"Process 1 exit\nmpirun noticed\n"


@pytest.mark.parametrize(
    "line",
    [
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        b"I0000 00:00:1795250392.336366    5528 port.cc:153] oneDNN custom operations are on.",
        b"2025-03-01 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations",
        b"I0000 00:00:1.2 3 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use",
        b"I0000 00:00:1.2 3 service.cc:153] XLA service 0x5589fc0e8cd0 initialized for platform Host",
        b"I0000 00:00:1.2 3 service.cc:161]   StreamExecutor [0]: Host, Default Version",
        b"I0000 00:00:1.2 3 device_compiler.h:208] Compiled cluster using XLA!",
        b"E0000 00:00:1.2 3 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to",
        b"W0000 00:00:1.2 3 computation_placer.cc:177] computation placer already registered",
        b"W0000 00:00:1.2 3 op_kernel.cc:1] OP_REQUIRES failed at mpi_ops.cc:754 : UNKNOWN: Horovod has been shut down",
        b"To enable the following instructions: AVX2, in other operations, rebuild TensorFlow",
        b"bash: line 1:  1362 Killed                  env HOROVOD_RANK=1 /v/python -P -m hvdtrain.worker train.py",
    ],
)
def test_greetings_are_noise(line: bytes) -> None:
    assert is_noise(line)
    for end in (b"\n", b"\r\n", b"\r"):
        assert without_noise(b"one\n" + line + end + b"two\n")[0] == [b"one\n", b"two\n"]


@pytest.mark.parametrize(
    "line",
    [
        b"x.py:6: UserWarning: real one",
        b"W0000 00:00:1.2 3 gpu_device.cc:2341] Cannot dlopen some GPU libraries.",
        b"2025-03-01 10:00:00.123456: W tensorflow/core/data/root.cc:163] Optimization failed",
        b"E0000 00:00:1.2 3 cuda_executor.cc:1] CUDA_ERROR_OUT_OF_MEMORY",
        b"[2025-01-01 00:00:00.1: W stall_inspector.cc:107] One or more tensors were submitted",
        b"Killed the wrong bird",
        b"bash: line 1: 1362 Killed  ./my_tool",
        b"I1122 21:34:10.123456 140123 train.py:10] step 5",
        b"I0000 00:00:1795384181.230767   18659 my_reader.cc:12] 40 files",
        b"I20251122 21:34:10.123456 18659 service.cc:5] ready",
        b"2025-03-01 10:00:00.123456: I my/own/op.cc:153] built",
        b"Iteration 7",
    ],
)
def test_warnings_are_not(line: bytes) -> None:
    assert not is_noise(line)


def test_stamps_do_not_make_two_warnings() -> None:
    first = b"W0000 00:00:1795250392.3    5528 a.cc:1] careful"
    second = b"W0000 00:00:1795250393.1    5529 a.cc:1] careful"
    assert without_stamp(first) == without_stamp(second)
    assert without_stamp(first) != without_stamp(first + b"!")


@pytest.mark.parametrize("all_ranks", [False, True])
def test_the_time_in_front_of_each_line(tmp_path: Path, all_ranks: bool) -> None:
    times = iter(range(9))
    terminal = Terminal(tmp_path, all_ranks=all_ranks, stamp=lambda: b"%d " % next(times))
    with terminal.output as output:
        output.feed("stdout", b"[1,0]<stdout>:o[1,0]<stdout>:ne\n[1,1]<stdout>:two\n")
        output.feed("stderr", b"[1,0]<stderr>:thr")
        output.settle()
        output.feed("stderr", b"[1,0]<stderr>:ee\n")
        output.finish()
    if all_ranks:
        assert terminal.out.getvalue() == b"[0] 0 one\n[1] 1 two\n"
        assert terminal.err.getvalue() == b"[0] 2 three\n"
    else:
        assert terminal.out.getvalue() == b"0 one\n"
        assert terminal.err.getvalue() == b"2 three\n"
    assert (tmp_path / "rank.0/stdout").read_bytes() == b"0 one\n"
    assert (tmp_path / "rank.1/stdout").read_bytes() == b"1 two\n"
    assert (tmp_path / "rank.0/stderr").read_bytes() == b"2 three\n"


def test_roles_are_called_by_their_names(tmp_path: Path) -> None:
    """Only the first one's failure is the run's; others are shown when they come."""
    process_names = ProcessNames(("chief", "worker-0"))
    ours, theirs = Failure(0, 3, False, "bug"), Failure(0, 1, False, "no memory")
    terminal = Terminal(tmp_path, process_names=process_names).run(
        b"[0]<stdout>:one\n[1]<stdout>:served\n",
        b"[1]<stderr>:warning\n[1]<stderr>:%s\n[0]<stderr>:%s\nhvdtrain: over\n"
        % (theirs.to_line().encode(), ours.to_line().encode()),
    )
    assert terminal.out.getvalue() == b"one\n"
    assert terminal.err.getvalue() == b"[worker-0] warning\n[worker-0] no memory\n"
    assert terminal.output.failures == [ours]
    assert terminal.logged("chief/stdout") == b"one\n"
    assert terminal.logged("worker-0/stderr") == b"warning\nno memory\n"
    assert terminal.logged("launcher.log") == b"hvdtrain: over\n"


def test_all_roles_are_shown_with_their_names(tmp_path: Path) -> None:
    process_names = ProcessNames(("chief", "ps-0"))
    terminal = Terminal(tmp_path, process_names=process_names, all_ranks=True)
    terminal.run(b"[0]<stdout>:one\n[1]<stdout>:two\n")
    assert terminal.out.getvalue() == b"[chief] one\n[ps-0] two\n"


def test_one_process_has_no_tags_and_no_launcher(tmp_path: Path) -> None:
    data = b"[1]<stdout>:mine [0"
    terminal = Terminal(tmp_path, process_names=ALONE).run(data, b"words\n")
    assert (terminal.out.getvalue(), terminal.err.getvalue()) == (data, b"words\n")
    assert terminal.logged("rank.0/stdout") == data
    assert not (tmp_path / "launcher.log").exists()


def test_what_tensorflow_says_of_a_worker_that_has_gone_is_noise() -> None:
    """The launch and the Trainer say it, in a line each."""
    said = (
        b"E0000 00:00:1795282794.139795    9320 context.cc:911] Failed to remove function remotely due "
        b"to failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:17884\n"
        b"Additional GRPC error information from remote target /job:worker/replica:0/task:1 while\n"
        b':UNKNOWN:Error received from peer  {grpc_message:"failed to connect"}\n'
        b"This could happen if the remote target has been disconnected from the client.\n"
    )
    assert all(map(is_noise, said.splitlines()))
    assert not any(without_noise(line)[0] for line in said.splitlines(keepends=True))
    assert not is_noise(
        b"Worker 1 is lost: another worker takes over its step. The worker may return"
    )


class Failing(io.BytesIO):
    """Takes nothing."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, data: object) -> int:
        raise OSError(self.number, "it is so")


def test_logs_that_cannot_be_kept_are_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "rank.0").touch()  # No folder can be made.
    (tmp_path / "rank.2").mkdir()
    (tmp_path / "rank.2" / "stdout").symlink_to("/dev/full")
    lines = b"[0]<stdout>:one\n[1]<stdout>:two\n[2]<stdout>:three\n"
    terminal = Terminal(tmp_path).run(lines + lines)
    assert terminal.out.getvalue() == b"one\n" * 2
    assert terminal.err.getvalue().decode() == (
        f"\ncannot save the output in {tmp_path}: File exists; the run continues without it\n"
    )
    assert terminal.logged("rank.1/stdout") == b"two\n" * 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_fails_is_left_and_the_logs_are_kept(
    tmp_path: Path, number: int, stream: str
) -> None:
    terminal = Terminal(tmp_path)
    other = terminal.err if stream == "stdout" else terminal.out
    streams = {"stdout": terminal.out, "stderr": terminal.err, stream: Failing(number)}
    terminal.output = Output(tmp_path, **streams)
    terminal.run(b"[0]<stdout>:one\n[0]<stdout>:two\n", b"[0]<stderr>:three\n[0]<stderr>:four\n")
    assert terminal.logged("rank.0/stdout") == b"one\ntwo\n"
    assert terminal.logged("rank.0/stderr") == b"three\nfour\n"
    assert terminal.output.unread == (number == errno.EPIPE)
    told = "\ncannot write standard output: it is so; the run continues, and its output is in "
    expected = "three\nfour\n" if stream == "stdout" else "one\ntwo\n"
    if stream == "stdout" and number == errno.EIO:
        expected = f"{told}{tmp_path}\n{expected}"
    assert other.getvalue().decode() == expected


def test_there_may_be_as_many_logs_as_the_system_allows(tmp_path: Path) -> None:
    """And afterwards as few as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, soft), hard))
    few = resource.getrlimit(resource.RLIMIT_NOFILE)
    lost: list[OSError] = []
    try:
        logs = LogFiles(tmp_path, lost.append)
        for number in range(200):
            logs.append(f"rank.{number}/stdout", b"x")
            logs.flush()
        logs.close()
        assert (lost, resource.getrlimit(resource.RLIMIT_NOFILE)) == ([], few)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(tmp_path.glob("rank.*/stdout"))) == 200


def test_a_failure_may_hold_any_text(tmp_path: Path) -> None:
    """Names of files that are no UTF-8 come back as the bytes that they are; other halves of characters, in
    words."""
    failure = Failure(0, 1, False, "no file caf\udce9 \ud800")
    named = Failure(1, 1, False, "no file caf\udce9")
    lines = [f"[{one.rank}]<stderr>:{one.to_line()}\n".encode() for one in (failure, named)]
    terminal = Terminal(tmp_path).run(stderr=b"".join(lines))
    assert terminal.output.failures == [failure, named]
    assert terminal.logged("rank.0/stderr") == b"no file caf\\udce9 \\ud800\n"
    assert terminal.logged("rank.1/stderr") == b"no file caf\xe9\n"
    terminal.output.say(named.text)
    assert terminal.err.getvalue() == b"no file caf\xe9\n"


@pytest.mark.parametrize(
    "fields", ["[]", '{"rank": 0}', '{"rank":0,"exit_code":"x","secondary":0,"text":7}', "[" * 9999]
)
def test_what_only_looks_like_a_failure_is_text(tmp_path: Path, fields: str) -> None:
    line = f"@hvdtrain-failure {fields}\n".encode()
    terminal = Terminal(tmp_path).run(stderr=b"[0]<stderr>:" + line)
    assert (terminal.output.failures, terminal.err.getvalue()) == ([], line)


def test_a_long_failure_is_cut_to_its_end() -> None:
    failure = from_line(Failure(0, 1, False, "\U0001f600" * 2 * LONGEST_TEXT + "end").to_line())
    assert failure is not None and failure.text.startswith("[...]\n")
    assert failure.text.endswith("end")


def test_files_are_for_the_user_only(tmp_path: Path) -> None:
    Terminal(tmp_path).run(b"[0]<stdout>:one\n", b"words\n")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"rank.0": 0o700, "stdout": 0o600, "launcher.log": 0o600}
