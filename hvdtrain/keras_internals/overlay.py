"""Replacing the class of an object by a subclass that files name as the original. Tested with Keras 3.15."""

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
    """Replace the class of `instance` by a subclass in which the methods of `mixin` come first.

    The object itself stays, and so do its state and references; files name its original class. An instance of `mixin`
    is left unchanged.

    Args:
        instance: Object to change.
        mixin: Class whose methods override those of the instance's class.
        named: Class that files name. Default: the original class.
        attributes: Further attributes of the new class.
    """
    if isinstance(instance, mixin):
        return
    plain = type(instance)
    named = named or plain
    subclass = type(named.__name__, (mixin, plain), {"__doc__": plain.__doc__} | attributes)
    adopt_names(subclass, named)
    instance.__class__ = subclass
