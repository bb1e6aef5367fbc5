"""The launch wing: from what the user asks to a running job. Imports neither TensorFlow nor
Horovod.

The package is callable: `hvdtrain.launch(function, np=2)` is a public name, and whoever imports a module of this
package makes `hvdtrain.launch` the package. So both are one object.
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
        """By name, as cloudpickle takes a plain module: a function may name this one."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallablePackage
