"""Options that horovodrun gives to a shell, or fails with, on real ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

from jobs import RANK, SECONDS, Job

SHOW = RANK + "print(rank, os.environ.get('A'), os.environ.get('HOROVOD_ELASTIC'), flush=True)\n"
NASTY = "o u t; touch evil"


def lines_of(job: Job) -> list[str]:
    stdout, stderr = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 0, stderr
    assert not (job.folder / "evil").exists()
    return sorted(stdout.splitlines())


def test_one_rank_with_an_output_folder_over_gloo(start: Callable[..., Job]) -> None:
    """horovodrun fails with these two."""
    options = ("--output-filename", NASTY, "--prefix-output-with-timestamp")
    lines = lines_of(job := start(SHOW, "-np", "1", "--controller", "gloo", *options))
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "at ", line) for line in lines] == [
        "at 0 None None"
    ]
    assert "0 None None" in (job.folder / NASTY / "rank.0/stdout").read_text()


def test_paths_and_options_for_mpirun_are_one_word_each(start: Callable[..., Job]) -> None:
    options = ("--output-filename", NASTY, "--mpi-args=-x 'A=b c*' --report-bindings")
    lines = lines_of(job := start(SHOW, "-np", "2", "--controller", "mpi", "--all-ranks", *options))
    assert lines == ["[0] 0 b c* None", "[1] 1 b c* None"]
    texts = [path.read_text() for path in (job.folder / NASTY).rglob("stdout")]
    # mpirun marks each piece that it reads.
    found = sorted(re.sub(r"\[1,\d\]<stdout>:", "", text) for text in texts)
    assert found == ["0 b c* None\n", "1 b c* None\n"]


def test_elastic_with_a_discovery_script(start: Callable[..., Job]) -> None:
    job = start(
        SHOW, "-np", "2", "--max-np", "2", "--all-ranks", "--host-discovery-script", "found"
    )
    assert job.process.communicate(timeout=SECONDS)[1].endswith("no such file: found\n")
    script = job.folder / "it's; touch evil"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    options = ("--all-ranks", "--host-discovery-script", script.name)
    assert lines_of(start(SHOW, "-np", "2", "--max-np", "2", *options)) == [
        "[0] 0 None 1",
        "[1] 1 None 1",
    ]


def test_programs_that_are_no_python_scripts(start: Callable[..., Job]) -> None:
    """They have the ranks' environment; one may end long before the others, and its exit code is the run's."""
    for flag, rank in (("--gloo", "HOROVOD_RANK"), ("--mpi", "OMPI_COMM_WORLD_RANK")):
        script = f'sleep "${rank}"\necho "${rank} ${{OMP_NUM_THREADS:+threads}}"\n'
        words = ("-np", "2", flag, "--all-ranks", "bash")
        assert lines_of(start(script, *words)) == ["[0] 0 threads", "[1] 1 threads"]
        job = start(f'exit "$((3 * {rank}))"\n', *words)
        job.process.communicate(timeout=SECONDS)
        assert job.process.returncode == 3


def test_the_interpreter_and_its_options(start: Callable[..., Job]) -> None:
    script = RANK + "import sys\nprint(rank, sys.flags.optimize, sys.argv, flush=True)\n"
    lines = lines_of(start(script, "-np", "2", "--gloo", "--all-ranks", "python", "-O"))
    assert lines == ["[0] 0 1 ['train.py']", "[1] 1 1 ['train.py']"]
