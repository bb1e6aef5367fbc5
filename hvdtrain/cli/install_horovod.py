"""`hvdtrain install-horovod`: build and install Horovod for this environment's TensorFlow."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from hvdtrain.errors import HvdtrainError


@click.command(name="install-horovod")
@click.option("--gpu", is_flag=True, help="Build with CUDA and NCCL.")
@click.option("--system-mpi", is_flag=True, help="Build with the MPI of the mpicxx in PATH.")
@click.option("--without-mpi", is_flag=True, help="Build without MPI, with Gloo only.")
@click.option("--force", is_flag=True, help="Build and install even if it is already installed.")
@click.option(
    "--dry-run", is_flag=True, help="Print the environment and the commands; run nothing."
)
def install_horovod(
    gpu: bool, system_mpi: bool, without_mpi: bool, force: bool, dry_run: bool
) -> None:
    """Build and install Horovod for the TensorFlow of this environment.

    Wheels are cached (in HVDTRAIN_CACHE, by default hvdtrain in your cache folder), one for each combination of
    Python, TensorFlow, MPI, and CPU or GPU. After the installation an allreduce is tested over Gloo and MPI.
    """
    from hvdtrain.install import build
    from hvdtrain.install.build_environment import missing_tools, survey
    from hvdtrain.install.cache import cache_folder
    from hvdtrain.install.recipe import recipe_for
    from hvdtrain.signals import leaving_on_signals

    if system_mpi and without_mpi:
        raise click.UsageError(
            "--system-mpi and --without-mpi are mutually exclusive: use only one."
        )
    found = survey(gpu=gpu, system_mpi=system_mpi, without_mpi=without_mpi)
    tools = missing_tools(cache_folder(os.environ), Path(tempfile.gettempdir()))
    if isinstance(found, list):
        _cannot_build(found + tools)
    wanted = recipe_for(found)
    if dry_run:
        click.echo(build.dry_run(wanted, force))
        return
    if tools and build.needs_build(wanted, force):
        _cannot_build(tools)
    # The build runs in its own session, and is ended on exit.
    with leaving_on_signals():
        changed = build.install(wanted, force=force)
    state = "is installed and works" if changed else "is already installed"
    click.echo(f"Horovod {build.recipe.HOROVOD_VERSION} {state} ({wanted.key}).")


def _cannot_build(missing: Sequence[str]) -> NoReturn:
    raise HvdtrainError("\n  ".join(["Horovod cannot be built here:", *missing]))
