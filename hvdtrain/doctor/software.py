"""The installed Python, TensorFlow, Keras and Horovod, compared with the versions that hvdtrain is tested with.

Read from the packages' metadata, so that a broken package is reported rather than imported. The tested versions stand
in setup.cfg (python_requires, the extras), nowhere else: what pip recorded of it is read here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hvdtrain.doctor.checks import Check, Options, Result, fail, ok, warn
from hvdtrain.install.build import installed_key
from hvdtrain.install.build_environment import Missing, TensorFlow, find_tensorflow, version_of
from hvdtrain.install.recipe import HOROVOD_VERSION

GROUP = "Software"
BACKEND = "Keras backend"
_BUILT_FOR = re.compile(r"-tensorflow(?P<version>[^-]+)-")
_REBUILD = "hvdtrain install-horovod"


def checks(options: Options) -> list[Check]:
    """The versions, and Keras's backend."""
    return [
        Check(GROUP, "versions", check_versions, options.quick),
        Check(GROUP, BACKEND, lambda: [check_backend(options.environ)], options.quick),
    ]


@dataclass(frozen=True)
class Range:
    """Versions such as `>=3.15,<3.16` or `==2.21.0`, as setup.cfg writes them.

    What follows a version's numbers (rc1, +local) does not count.
    """

    text: str

    def __contains__(self, version: str) -> bool:
        try:
            return Version(Version(version).base_version) in SpecifierSet(self.text)
        except InvalidVersion:
            return False

    def __str__(self) -> str:
        return self.text.removeprefix("==")


def tested_python() -> Range:
    """The Python versions that hvdtrain was built and run on."""
    try:
        return _range(importlib.metadata.metadata("hvdtrain")["Requires-Python"] or "")
    except importlib.metadata.PackageNotFoundError:
        return Range("")  # Sources that nobody installed: nothing is recorded, nothing is refused.


def tested_range(distribution: str) -> Range:
    """The versions of a distribution that one of hvdtrain's extras requires; any version if none does."""
    try:
        requirements = importlib.metadata.requires("hvdtrain") or ()
    except importlib.metadata.PackageNotFoundError:
        requirements = ()
    for requirement in map(Requirement, requirements):
        if requirement.name.lower() == distribution:
            return _range(str(requirement.specifier))
    return Range("")


def _range(text: str) -> Range:
    """The range of pip's record, which sorts bounds in its own way; a reader expects the lower one first."""
    return Range(",".join(sorted(text.split(","), key=lambda bound: bound.startswith("<"))))


def check_versions() -> Sequence[Result]:
    """Python, TensorFlow, Keras, Horovod."""
    tensorflow = find_tensorflow(gpu=False)
    return [
        check_python(platform.python_version()),
        check_tensorflow(tensorflow),
        check_keras(version_of("keras")),
        check_horovod(version_of("horovod"), installed_key(), tensorflow),
    ]


def check_python(version: str) -> Result:
    """Whether Horovod was built and run on this Python."""
    tested = tested_python()
    seen = f"{version} ({sys.executable})"
    if version in tested:
        return ok("Python", seen)
    fix = "create an environment with Python 3.11, 3.12 or 3.13"
    return fail("Python", f"{seen}; tested: {tested}", fix)


def check_tensorflow(found: TensorFlow | Missing) -> Result:
    """Another minor version is a failure: Horovod is compiled against TensorFlow's internals, which change."""
    if isinstance(found, Missing):
        seen, _, fix = found.partition(": ")
        return fail("TensorFlow", seen, fix)
    tested = tested_range(found.distribution)
    seen = f"{found.version} ({found.distribution})"
    if minor(found.version) == minor(str(tested)) or not tested.text:
        return ok("TensorFlow", seen)
    extra = "cpu" if found.distribution == "tensorflow-cpu" else "gpu"
    return fail("TensorFlow", f"{seen}; tested: {tested}", f"pip install 'hvdtrain[{extra}]'")


def check_keras(version: str | None) -> Result:
    """hvdtrain.keras uses Keras's internals, so an untested minor release may be silently wrong."""
    tested = tested_range("keras")
    fix = f"pip install 'keras{tested.text}'"
    if version is None:
        return fail("Keras", "not installed", fix)
    if version in tested:
        return ok("Keras", version)
    return fail("Keras", f"{version}; tested: {tested}", fix)


def check_horovod(version: str | None, key: str | None, tensorflow: TensorFlow | Missing) -> Result:
    """Horovod's version, and the TensorFlow that it was built for (`key`: see install.build.installed_key)."""
    if version is None:
        return fail("Horovod", "not installed", _REBUILD)
    if version != HOROVOD_VERSION:
        return fail("Horovod", f"{version}; tested: {HOROVOD_VERSION}", f"{_REBUILD} --force")
    built = _BUILT_FOR.search(key) if key else None
    if built is None or isinstance(tensorflow, Missing):
        return ok("Horovod", version)
    seen = f"{version}, built for TensorFlow {built['version']}"
    if built["version"] != tensorflow.version:
        return fail("Horovod", f"{seen}; installed: {tensorflow.version}", _REBUILD)
    return ok("Horovod", seen)


def check_backend(environ: Mapping[str, str]) -> Result:
    """Keras must be set to TensorFlow: by KERAS_BACKEND, else by a file in the home folder."""
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        seen = "TF_USE_LEGACY_KERAS makes tf.keras Keras 2"
        fix = (
            "unset TF_USE_LEGACY_KERAS; with it only hvdtrain.keras works, on Horovod's own code; "
            "the Trainer does not"
        )
        return warn(BACKEND, seen, fix)
    if named := environ.get("KERAS_BACKEND"):
        if named == "tensorflow":
            return ok(BACKEND, "tensorflow")
        return fail(BACKEND, f"KERAS_BACKEND is {named}", "export KERAS_BACKEND=tensorflow")
    file = _keras_folder(environ) / "keras.json"
    try:
        settings = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        settings = {}  # Keras takes its defaults, also for a file that is no JSON.
    except OSError as error:
        return fail(BACKEND, f"{file}: {error.strerror}", "make it readable: Keras reads it")
    if not isinstance(settings, dict):
        return fail(BACKEND, f"{file} is not a JSON object, so Keras does not load", f"rm {file}")
    backend = settings.get("backend", "tensorflow")
    if backend == "tensorflow":
        return ok(BACKEND, "tensorflow")
    fix = "export KERAS_BACKEND=tensorflow, or edit the file"
    return fail(BACKEND, f"{backend}, in {file}", fix)


def _keras_folder(environ: Mapping[str, str]) -> Path:
    """As Keras finds it."""
    if "KERAS_HOME" in environ:
        return Path(environ["KERAS_HOME"])
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - stays ~ where nobody knows a home
    return (home if os.access(home, os.W_OK) else Path("/tmp")) / ".keras"


def minor(version: str) -> str:
    """`2.21` of `2.21.0`."""
    return ".".join(version.split(".")[:2])
