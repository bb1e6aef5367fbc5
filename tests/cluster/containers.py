"""Podman with a storage of its own, and hvdtrain's CPU image built in it from docker/Dockerfile.cpu.

The storage is in hvdtrain's cache folder, outside the clone: podman rebuilds only what has changed, so a second run
takes seconds where the first takes minutes. The base image, which a registry would give, is made with debootstrap
from the machine's own Debian mirror and gets the official name. What this machine needs to reach package servers
(mirror, proxy, certificates) is read from its apt and pip, and given to the build as secrets and mounts.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from jobs import REPOSITORY

from hvdtrain.install.cache import cache_folder

IMAGE = "hvdtrain:cpu"
BUILD_SECONDS = 900
# Program -> its package. The last two are podman's network and its name service.
_PROGRAMS = {
    "podman": "podman",
    "buildah": "buildah",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "netavark": "netavark",
    "aardvark-dns": "aardvark-dns",
}
_SYSTEM = ("/usr/sbin", "/sbin", "/usr/lib/podman", "/usr/libexec/podman")
# Inside the sandboxes that CI jobs run in, limits cannot be raised, nor cgroups and seccomp be set up.
_CONTAINERS_CONF = """
[containers]
netns = "host"
pids_limit = 0
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
seccomp_profile = "unconfined"
[network]
network_backend = "netavark"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


@dataclass(frozen=True)
class Podman:
    """Podman on the storage in `folder`.

    Attributes:
        environment: of every podman command; `hvdtrain docker` started with it uses the same storage.
    """

    folder: Path
    environment: Mapping[str, str]

    def run(self, *words: str, timeout: float = 120, check: bool = True, **settings: Any) -> Any:
        """`podman WORDS`, with its output as text; fails the test if it fails."""
        done = subprocess.run(
            ["podman", *words],
            env=self.environment,
            stdin=settings.pop("stdin", subprocess.DEVNULL),
            capture_output=True,
            timeout=timeout,
            **settings,
        )
        output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        assert not check or done.returncode == 0, (words, output[-3000:], errors[-3000:])
        return subprocess.CompletedProcess(words, done.returncode, output, errors)

    def build(self, dockerfile: str, tag: str, *options: str) -> str:
        """Build the repository's `dockerfile`; returns what podman said."""
        said = self.run(
            *("build", "--format", "docker", "--network", "host"),
            *("--file", str(REPOSITORY / dockerfile), "--tag", tag),
            *_package_servers(self.folder),
            *options,
            str(REPOSITORY),
            timeout=BUILD_SECONDS,
        )
        return said.stdout + said.stderr


@contextlib.contextmanager
def podman_of_tests() -> Iterator[Podman]:
    """Podman, used by one test run at a time; leaves no container. Skips the test where it cannot be."""
    problem = needed()
    if problem:
        pytest.skip(problem)
    folder = cache_folder(os.environ) / "containers"
    for name in ("conf", "run", "storage", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    podman = Podman(folder, {**os.environ, **_write_configuration(folder)})
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield podman
        finally:
            podman.run("rm", "--all", "--force", "--time", "0")
            podman.run("volume", "prune", "--force")
            # Layers of Dockerfiles that were changed a week ago; those of today's stay.
            podman.run("image", "prune", "--force", "--filter", "until=168h", check=False)


def needed() -> str:
    """What is missing here to build and run containers; empty when nothing is."""
    if os.geteuid() != 0:
        return "needs root, for containers in network namespaces"
    path = os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM))
    missing = {package for name, package in _PROGRAMS.items() if not shutil.which(name, path=path)}
    if missing:
        return f"needs {', '.join(sorted(missing))}: run scripts/cluster_packages.sh"
    return ""


def _write_configuration(folder: Path) -> dict[str, str]:
    """Files that keep podman off the machine's own storage; returns the variables that name them."""
    storage = f'graphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
    (folder / "conf/storage.conf").write_text(f'[storage]\ndriver = "overlay"\n{storage}')
    (folder / "conf/containers.conf").write_text(_CONTAINERS_CONF)
    (folder / "conf/registries.conf").write_text('unqualified-search-registries = ["docker.io"]\n')
    return {
        "CONTAINERS_STORAGE_CONF": str(folder / "conf/storage.conf"),
        "CONTAINERS_CONF": str(folder / "conf/containers.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(folder / "conf/registries.conf"),
        # Podman keeps the build's cache mounts (pip's downloads, built wheels) there.
        "TMPDIR": str(folder / "tmp"),
        "PATH": os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM)),
    }


def build_cpu_image(podman: Podman) -> str:
    """Make the base image if it is not there, and build the CPU image; returns what the build said."""
    make_base(podman)
    wheels = cache_folder(os.environ) / "wheels"
    wheels.mkdir(exist_ok=True)
    return podman.build("docker/Dockerfile.cpu", IMAGE, "--build-context", f"wheels={wheels}")


def base_name() -> str:
    """The base image's name in Dockerfile.cpu."""
    found = re.search(
        r"^ARG BASE=(\S+)$", (REPOSITORY / "docker/Dockerfile.cpu").read_text(), re.MULTILINE
    )
    assert found
    return found[1]


def make_base(podman: Podman) -> None:
    """A Debian under the official image's name."""
    name = f"docker.io/library/{base_name()}"
    if podman.run("image", "exists", name, check=False).returncode == 0:
        return
    suite = base_name().partition(":")[2].partition("-")[0]
    root = podman.folder / "tmp/base"
    shutil.rmtree(root, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", suite, str(root), *_debian_mirror()]
    done = subprocess.run(command, capture_output=True, text=True, env=podman.environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    proxy = _output("apt-config", "dump", "Acquire::http::Proxy")
    (root / "etc/apt/apt.conf.d/90proxy").write_text(proxy)
    for file in (root / "var/cache/apt/archives").glob("*.deb"):
        file.unlink()
    archive = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
    with archive:
        podman.run("import", "--quiet", "--change", 'CMD ["bash"]', "-", name, stdin=archive.stdout)
    shutil.rmtree(root)


def _debian_mirror() -> list[str]:
    """The archive that apt uses here, if this is a Debian; else debootstrap has its own."""
    if platform.freedesktop_os_release().get("ID") == "debian":
        files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
        text = "\n".join(file.read_text() for file in files if file.is_file())
        found = re.search(r"^(?:URIs:|deb(?: \[.*\])?)\s+(http://\S+/debian/?)\s*", text, re.M)
        return [found[1]] if found else []
    return []


def _package_servers(folder: Path) -> list[str]:
    """Options of a build that let pip inside it go where pip goes here; none of it stays in the image."""
    settings = _pip_settings()
    certificates = settings.pop("cert", None) or os.environ.get("REQUESTS_CA_BUNDLE")
    options = []
    if certificates:
        options += ["--secret", f"id=ca.crt,src={certificates}"]
        settings["cert"] = "/run/secrets/ca.crt"
    if settings:
        lines = [f"{name} = {value}" for name, value in settings.items()]
        file = folder / "conf/pip.conf"
        file.write_text("\n".join(["[global]", *lines, ""]))
        options += ["--secret", f"id=pip.conf,src={file}"]
    for place in {place for value in settings.values() for place in _folders(value)}:
        options += ["--volume", f"{place}:{place}:ro"]
    return options


def _pip_settings() -> dict[str, str]:
    """Where pip gets packages from here: its files, then its environment."""
    wanted = {"cert", "extra-index-url", "find-links", "index-url", "proxy", "trusted-host"}
    found = {}
    for line in sorted(
        _output(sys.executable, "-m", "pip", "config", "list").splitlines(),
        key=lambda line: line.startswith(":env:"),
    ):
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in wanted:
            found[key] = " ".join(str(ast.literal_eval(value)).split())
    return found


def _folders(value: str) -> Iterator[str]:
    """The folders of this machine that a setting of pip's names."""
    for word in value.split():
        if word.startswith("file://"):
            # The pages of an index name files beside it.
            yield str(Path(urlparse(word).path).parent)
        elif word.startswith("/") and Path(word).is_dir():
            yield word


def _output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
