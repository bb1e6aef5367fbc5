"""Compare the installed Python, TensorFlow, Keras and Horovod with the versions that hvdtrain is tested with.

They are read from the packages' metadata, so that a broken package is reported rather than imported. The tested
versions are defined only in setup.cfg (python_requires, the extras), and read here from what pip recorded of it.
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
    """Return the checks of versions and of Keras's backend."""
    return [
        Check(GROUP, "versions", check_versions, options.quick),
        Check(GROUP, BACKEND, lambda: [check_backend(options.environ)], options.quick),
    ]


@dataclass(frozen=True)
class Range:
    """A range of versions such as `>=3.15,<3.16` or `==2.21.0`, as in setup.cfg.

    Suffixes of a version (rc1, +local) are ignored.
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
    """Return the Python versions that hvdtrain supports."""
    try:
        return _range(importlib.metadata.metadata("hvdtrain")["Requires-Python"] or "")
    except importlib.metadata.PackageNotFoundError:
        return Range("")  # Sources that are not installed have no record: accept any version.


def tested_range(distribution: str) -> Range:
    """Return the versions of a distribution that hvdtrain's extras require; any version if none does."""
    try:
        requirements = importlib.metadata.requires("hvdtrain") or ()
    except importlib.metadata.PackageNotFoundError:
        requirements = ()
    for requirement in map(Requirement, requirements):
        if requirement.name.lower() == distribution:
            return _range(str(requirement.specifier))
    return Range("")


def _range(text: str) -> Range:
    """Convert the range in pip's record, with the lower bound first, as a reader expects."""
    return Range(",".join(sorted(text.split(","), key=lambda bound: bound.startswith("<"))))


def check_versions() -> Sequence[Result]:
    """Check Python, TensorFlow, Keras and Horovod."""
    tensorflow = find_tensorflow(gpu=False)
    return [
        check_python(platform.python_version()),
        check_tensorflow(tensorflow),
        check_keras(version_of("keras")),
        check_horovod(version_of("horovod"), installed_key(), tensorflow),
    ]


def check_python(version: str) -> Result:
    """Check that hvdtrain supports this Python version."""
    tested = tested_python()
    seen = f"{version} ({sys.executable})"
    if version in tested:
        return ok("Python", seen)
    fix = "create an environment with Python 3.11, 3.12 or 3.13"
    return fail("Python", f"{seen}; tested: {tested}", fix)


def check_tensorflow(found: TensorFlow | Missing) -> Result:
    """Check TensorFlow. Another minor version fails: Horovod is compiled against internals, which change."""
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
    """Check Keras. An untested minor version fails: hvdtrain.keras uses internals, and might be silently wrong."""
    tested = tested_range("keras")
    fix = f"pip install 'keras{tested.text}'"
    if version is None:
        return fail("Keras", "not installed", fix)
    if version in tested:
        return ok("Keras", version)
    return fail("Keras", f"{version}; tested: {tested}", fix)


def check_horovod(version: str | None, key: str | None, tensorflow: TensorFlow | Missing) -> Result:
    """Check Horovod's version, and the TensorFlow for which it was built."""
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
    """Check that Keras is set to TensorFlow, by KERAS_BACKEND or else by a file in the home folder."""
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
        settings = {}  # Keras uses its defaults, even if the file is not JSON.
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
    """Return Keras's folder, found as Keras does."""
    if "KERAS_HOME" in environ:
        return Path(environ["KERAS_HOME"])
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - stays ~ where nobody knows a home
    return (home if os.access(home, os.W_OK) else Path("/tmp")) / ".keras"


def minor(version: str) -> str:
    """Return the minor version, such as `2.21` for `2.21.0`."""
    return ".".join(version.split(".")[:2])
