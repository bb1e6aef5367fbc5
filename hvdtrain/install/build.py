"""Install Horovod: get the wheel from the cache or build it, install it, and test an allreduce of two ranks."""

import importlib.metadata
import json
import os
import shlex
import sysconfig
import tempfile
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlparse

import click

from hvdtrain.errors import HvdtrainError
from hvdtrain.host_limits import available_cores
from hvdtrain.install import recipe, selftest
from hvdtrain.install.cache import WheelCache, cache_folder
from hvdtrain.install.logged_command import CommandFailed, run
from hvdtrain.install.recipe import Recipe, Workspace
from hvdtrain.launch.running import timed_command


def installed_key() -> str | None:
    """Return the recipe key of the installed Horovod. None if there is none, or it was installed in another way.

    pip records the path of an installed wheel, and our wheels are in a folder named by their key.
    """
    try:
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return key_of_direct_url(text) if text else None


def key_of_direct_url(text: str) -> str | None:
    """Return the name of the wheel's folder from pip's direct_url.json."""
    try:
        url = json.loads(text)["url"]
    except (ValueError, KeyError, TypeError):
        return None
    return PurePosixPath(unquote(urlparse(url).path)).parent.name or None


def needs_build(wanted: Recipe, force: bool) -> bool:
    """Return whether the recipe's Horovod is neither installed nor in the cache, or a build is forced."""
    cache = WheelCache(cache_folder(os.environ))
    return force or (installed_key() != wanted.key and cache.find(wanted.key) is None)


def install(wanted: Recipe, *, force: bool) -> bool:
    """Install the Horovod of a recipe.

    Args:
        wanted: Recipe of the Horovod to install.
        force: Whether to build and install it even if it is installed or cached.

    Returns:
        Whether anything was installed.

    Raises:
        HvdtrainError: The build, the installation or the allreduce test failed.
    """
    if not force and installed_key() == wanted.key:
        return False
    cache = WheelCache(cache_folder(os.environ))
    log = cache.logs / f"{wanted.key}.log"
    with cache.lock(wanted.key):
        log.unlink(missing_ok=True)
        wheel = None if force else cache.find(wanted.key)
        if wheel:
            click.echo(f"Horovod {recipe.HOROVOD_VERSION} from the cache: {wheel.parent}")
        else:
            wheel = build(wanted, cache, log)
        run(recipe.runtime_command(), label="Installing Horovod's dependencies", log=log)
        run(recipe.install_command(wheel), label="Installing Horovod", log=log)
    try:
        test(wanted, log)
    except BaseException:
        # Uninstalled again, or the next call would take the untested build for a working one.
        run(recipe.uninstall_command(), label="Removing Horovod again", log=log)
        raise
    return True


def build(wanted: Recipe, cache: WheelCache, log: Path) -> Path:
    """Build the wheel in a temporary folder and add it to the cache. The caller holds the key's lock.

    Raises:
        HvdtrainError: A command failed, or produced no wheel. The message names the log.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as root:
        workspace = Workspace(Path(root))
        prepare(wanted, workspace)
        run(recipe.tools_command(workspace), label="Getting cmake", log=log)
        run(
            recipe.wheel_command(workspace),
            label=f"Building Horovod {recipe.HOROVOD_VERSION}",
            log=log,
            environment=recipe.build_environment(wanted, workspace, os.environ, available_cores()),
        )
        wheels = list(workspace.wheels.glob("horovod-*.whl"))
        if len(wheels) != 1:
            raise HvdtrainError(
                f"The build produced no wheel in {workspace.wheels}; its log: {log}"
            )
        return cache.keep(wanted.key, wheels[0])


def prepare(wanted: Recipe, workspace: Workspace) -> None:
    """Create the files in the workspace that the build's commands refer to."""
    workspace.temporary.mkdir()
    workspace.requirements.write_text(recipe.HOROVOD_SDIST + "\n")
    workspace.cmake.write_text(recipe.cmake_launcher(wanted, workspace, horovod_folder()))
    workspace.cmake.chmod(0o755)
    for link, target in _nccl_links(wanted, workspace).items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


def _nccl_links(wanted: Recipe, workspace: Workspace) -> dict[Path, Path]:
    """Return the links to NCCL's wheel that the linker needs -> what they lead to."""
    cuda = wanted.survey.cuda
    if not (cuda and cuda.nccl_is_wheel):
        return {}
    library = cuda.nccl_home / "lib/libnccl.so.2"
    links = {workspace.nccl / "lib" / name: library for name in ("libnccl.so", "libnccl.so.2")}
    return {workspace.nccl / "include": cuda.nccl_home / "include", **links}


def test(wanted: Recipe, log: Path) -> None:
    """Test an allreduce of two ranks over each controller that was built.

    Raises:
        HvdtrainError: The allreduce failed, or a program is missing. The message names the log.
    """
    environment = selftest.environment(os.environ)

    def tried(argv: list[str]) -> timed_command.CompletedCommand:
        said = timed_command.run(argv, limit=selftest.TIMEOUT_SECONDS, environ=environment)
        if said is None:
            raise HvdtrainError(f"{argv[0]} is missing: pip has installed Horovod without it")
        with log.open("a") as file:
            file.write(f"\n$ {shlex.join(argv)}\n{said.text}")
        return said

    for controller in ("gloo", "mpi") if wanted.survey.mpi else ("gloo",):
        label = f"Allreduce of {selftest.RANKS} ranks over {controller}"
        click.echo(label)
        said = tried(selftest.command(controller))
        if said.returncode == 0 and selftest.PASSED in said.stdout:
            continue
        # If the library fails to load, this shows the reason once, without the launcher's messages.
        loaded = tried(selftest.load_command())
        if loaded.returncode != 0:
            label, said = "Loading Horovod", loaded
        ending = "timed out" if said.returncode is None else "failed"
        if said.returncode == 0:
            ending = "ended without a result"
        raise CommandFailed(label, ending, said.text, log)


def dry_run(wanted: Recipe, force: bool) -> str:
    """Return what `install` would do, as shell commands that can be pasted."""
    version = recipe.HOROVOD_VERSION
    head = f"# Horovod {version} ({wanted.key})"
    cache = WheelCache(cache_folder(os.environ))
    kept = cache.wheels / wanted.key
    building = _build_lines(wanted, kept)
    if not force and installed_key() == wanted.key:
        head += " is already installed: nothing to do. With --force:"
    elif not force and cache.find(wanted.key) is not None:
        head, building = f"{head} from the cache:", []
    else:
        head += ": build, then install:"
    # The wheel's full name is known after the build; quotes would keep the shell from finding it.
    install_wheel = f"{shlex.join(recipe.install_command(kept))}/horovod-{version}-*.whl"
    return "\n".join([head, *building, shlex.join(recipe.runtime_command()), install_wheel])


def _build_lines(wanted: Recipe, kept: Path) -> list[str]:
    """Return the commands of `build`."""
    workspace = Workspace(Path(tempfile.gettempdir(), "hvdtrain-horovod"))
    environment = recipe.build_environment(wanted, workspace, os.environ, available_cores())
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    launcher = recipe.cmake_launcher(wanted, workspace, horovod_folder())
    lines = [
        shlex.join(["mkdir", "-p", *map(str, (workspace.temporary, kept))]),
        f"{shlex.join(['printf', '%s', launcher])} > {shlex.quote(str(workspace.cmake))}",
        shlex.join(["chmod", "+x", str(workspace.cmake)]),
        f"{shlex.join(['echo', recipe.HOROVOD_SDIST])} > {shlex.quote(str(workspace.requirements))}",
    ]
    for link, target in _nccl_links(wanted, workspace).items():
        lines.append(shlex.join(["mkdir", "-p", str(link.parent)]))
        lines.append(shlex.join(["ln", "-sfn", str(target), str(link)]))
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(changed.items())]
    wheels = shlex.quote(str(workspace.wheels))
    return [
        *lines,
        shlex.join(recipe.tools_command(workspace)),
        " ".join(["env", *variables, shlex.join(recipe.wheel_command(workspace))]),
        f"cp {wheels}/horovod-*.whl {shlex.quote(str(kept))}",
    ]


def horovod_folder() -> Path:
    """Return the folder of Horovod's TensorFlow library after installation."""
    return Path(sysconfig.get_path("platlib"), "horovod/tensorflow").resolve()
