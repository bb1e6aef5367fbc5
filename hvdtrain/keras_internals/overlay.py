"""Give an object a subclass of its own class, in place, that files name as the original. Tested with Keras 3.15."""

from __future__ import annotations

from typing import Any

from keras.src import api_export
from keras.src.saving import object_registration


def adopt_names(subclass: type, parent: type) -> None:
    """Make Keras save instances of `subclass` as `parent`, so that files load without hvdtrain."""
    subclass.__module__ = parent.__module__
    subclass.__qualname__ = parent.__qualname__
    exported = api_export.get_name_from_symbol(parent)
    if exported is not None:
        api_export.REGISTERED_OBJS_TO_NAMES[subclass] = exported
    registered = object_registration.GLOBAL_CUSTOM_NAMES.get(parent)
    if registered is not None:
        object_registration.GLOBAL_CUSTOM_NAMES[subclass] = registered


def overlay(instance: Any, mixin: type, named: type | None = None, **attributes: Any) -> None:
    """Make `instance` one of a subclass of its class, in which the methods of `mixin` come first.

    One that has `mixin` already is left as it is. In place, so that `isinstance`, state and references stay; files
    name the original class.

    Args:
        named: class that files name instead.
        attributes: of the new class.
    """
    if isinstance(instance, mixin):
        return
    plain = type(instance)
    named = named or plain
    subclass = type(named.__name__, (mixin, plain), {"__doc__": plain.__doc__} | attributes)
    adopt_names(subclass, named)
    instance.__class__ = subclass
