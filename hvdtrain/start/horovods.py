"""Horovod's launcher modules, loaded without the part for LSF.

That part (`--jsrun`) asks distutils for a program's path, which loads setuptools (0.25 s), and
fails where Python 3.12 or later has none. hvdtrain never asks for it.
"""

import sys
import types

_without = types.ModuleType("horovod.runner.js_run")
_without.js_run = None  # type: ignore[attr-defined]
_without.is_jsrun_installed = lambda: False  # type: ignore[attr-defined]
sys.modules.setdefault("horovod.runner.js_run", _without)

from horovod.runner import gloo_run, launch  # noqa: E402
from horovod.runner.common.util import env as horovod_env  # noqa: E402
from horovod.runner.common.util import hosts as horovod_hosts  # noqa: E402
from horovod.runner.common.util import safe_shell_exec  # noqa: E402
from horovod.runner.util import network  # noqa: E402

__all__ = ["gloo_run", "horovod_env", "horovod_hosts", "launch", "network", "safe_shell_exec"]
