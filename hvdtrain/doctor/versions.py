"""Python, TensorFlow, Keras and Horovod as they are installed, against the versions that hvdtrain is tested with.

Read from the packages' metadata, so that a broken package is reported rather than met.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence

from hvdtrain.doctor.finding import Finding, fail, ok
from hvdtrain.doctor.tested import minor, tested_python, tested_range, version_of
from hvdtrain.install.build import installed_key
from hvdtrain.install.probe import Missing, TensorFlow, find_tensorflow
from hvdtrain.install.recipe import HOROVOD_VERSION

_BUILT_FOR = re.compile(r"-tensorflow(?P<version>[^-]+)-")
REBUILD = "hvdtrain install-horovod"


def look_at_versions() -> Sequence[Finding]:
    """Python, TensorFlow, Keras, Horovod."""
    tensorflow = find_tensorflow(gpu=False)
    return [
        python_finding(platform.python_version()),
        tensorflow_finding(tensorflow),
        keras_finding(version_of("keras")),
        horovod_finding(version_of("horovod"), installed_key(), tensorflow),
    ]


def python_finding(version: str) -> Finding:
    tested = tested_python()
    seen = f"{version} ({sys.executable})"
    if version in tested:
        return ok("Python", seen)
    return fail(
        "Python", f"{seen}; tested: {tested}", "make an environment with Python 3.11, 3.12 or 3.13"
    )


def tensorflow_finding(found: TensorFlow | Missing) -> Finding:
    """Another minor version is red: Horovod is compiled against TensorFlow's insides, which change with each."""
    if isinstance(found, Missing):
        seen, _, fix = found.partition(": ")
        return fail("TensorFlow", seen, fix)
    tested = tested_range(found.distribution)
    seen = f"{found.version} ({found.distribution})"
    if minor(found.version) == minor(str(tested)) or not tested.text:
        return ok("TensorFlow", seen)
    extra = "cpu" if found.distribution == "tensorflow-cpu" else "gpu"
    return fail("TensorFlow", f"{seen}; tested: {tested}", f"pip install 'hvdtrain[{extra}]'")


def keras_finding(version: str | None) -> Finding:
    """hvdtrain.keras reaches into Keras, so that a minor release that is not tested may be silently wrong."""
    tested = tested_range("keras")
    fix = f"pip install 'keras{tested.text}'"
    if version is None:
        return fail("Keras", "not installed", fix)
    if version in tested:
        return ok("Keras", version)
    return fail("Keras", f"{version}; tested: {tested}", fix)


def horovod_finding(
    version: str | None, key: str | None, tensorflow: TensorFlow | Missing
) -> Finding:
    """Horovod's version, and the TensorFlow that it was built for (`key`: see install.build.installed_key)."""
    if version is None:
        return fail("Horovod", "not installed", REBUILD)
    if version != HOROVOD_VERSION:
        return fail("Horovod", f"{version}; tested: {HOROVOD_VERSION}", f"{REBUILD} --force")
    built = _BUILT_FOR.search(key) if key else None
    if built is None or isinstance(tensorflow, Missing):
        return ok("Horovod", version)
    seen = f"{version}, built for TensorFlow {built['version']}"
    if built["version"] != tensorflow.version:
        return fail("Horovod", f"{seen}; installed: {tensorflow.version}", REBUILD)
    return ok("Horovod", seen)
