"""The launch wing turns a user's options into a running job. It imports neither TensorFlow nor Horovod.

The package itself is callable because `hvdtrain.launch(function, np=2)` is a public name, and importing any module of
this package sets `hvdtrain.launch` to the package.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """See `hvdtrain.launch.launch_function.launch`."""
        from hvdtrain.launch.launch_function import launch

        return launch(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as cloudpickle pickles a plain module, because a pickled function may refer to this one."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallablePackage
