"""The joint where names in a recipe become classes and functions, built-in ones and the user's own alike.

A recipe has a built-in name or `package.module:name`; a table maps built-in names to import paths. This module does not
import torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from midflight.actor.failures import reason_of
from midflight.config.section import OWN_TYPE, OwnSection, Section
from midflight.errors import MidflightError, RecipeError
from midflight.launch.users_modules import anchored_options, import_users_module

Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class Joint(Generic[Built]):
    """One key of a recipe that names an implementation.

    An implementation gets its options as keyword arguments, and every offered argument that it has a parameter for. A
    class that takes `**kwargs` gets all offered arguments.
    """

    key: str
    known: Mapping[str, str]  # built-in name -> import path
    protocol: type | None = None  # protocol of the objects; None: a function, called with one positional argument
    # Replaces `protocol` for an implementation with a member that only `other_protocol` has. Error messages always name
    # `other_protocol`, which is the more general term.
    other_protocol: type | None = None

    def bind(self, name: str, offered: Mapping[str, Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the implementation bound to its keyword arguments, without calling it.

        Raises: RecipeError if it cannot be imported, lacks a member of the protocol or does not take the options.
        """
        target = self.find(name)
        try:
            signature = inspect.signature(target)
            takes_all = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in signature.parameters.values())
            takes_all &= self.protocol is not None
            taken = {key: value for key, value in offered.items() if takes_all or key in signature.parameters}
            options = anchored_options(target, options)
            signature.bind(*(() if self.protocol else (None,)), **taken | options)
        except (TypeError, ValueError) as error:
            section = self.key.removesuffix(".type")
            raise RecipeError(f"{section}.options: {name}: {error}") from error
        return functools.partial(target, **taken | options)

    def make(self, name: str, offered: Mapping[str, Any], options: Mapping[str, Any]) -> Built:
        """Return an object made by the implementation. Raises: RecipeError, or any error of the constructor."""
        built: Built = self.bind(name, offered, options)()
        self._check_members(name, built)
        return built

    def try_to_make(self, name: str, offered: Mapping[str, Any], options: Mapping[str, Any]) -> Built:
        """Same as `make`, with every error of the constructor as a RecipeError. Raises: RecipeError."""
        with users_code(f"{self.key}: {name}, the constructor"):
            return self.make(name, offered, options)

    def find(self, name: str) -> Callable[..., Any]:
        """Return the class or function of this name. Raises: RecipeError if it cannot be imported."""
        path = self.known.get(name, name)
        module, colon, attribute = path.partition(":")
        if not colon:
            raise RecipeError(f"{self.key}: there is no {name!r}; known are {', '.join([*self.known, OWN_TYPE])}")
        target: Callable[..., Any] = self._import(path, module, attribute)
        if not callable(target):
            raise RecipeError(f"{self.key}: {path!r} is of type {type(target).__name__}, not a class or function")
        if isinstance(target, type):
            self._check_members(path, target)
        return target

    def _import(self, path: str, module: str, attribute: str) -> Any:
        try:
            imported = import_users_module(module)
        except MidflightError as error:
            raise RecipeError(f"{self.key}: cannot import {path!r}: {error}") from error
        except Exception as error:
            raise RecipeError(f"{self.key}: cannot import {path!r}: {reason_of(error)}") from error
        if not hasattr(imported, attribute):
            raise RecipeError(
                f"{self.key}: cannot import {path!r}: module {module!r} has no attribute {attribute!r}"
                f" ({getattr(imported, '__file__', 'built in')})"
            )
        return getattr(imported, attribute)

    def _check_members(self, name: str, target: Any) -> None:
        protocol = self._protocol_of(target)
        if protocol is None:
            return
        missing = [member for member in members_of(protocol) if not hasattr(target, member)]
        if isinstance(target, type):
            missing = [member for member in missing if not _is_set_later(target, member)]
        if missing:
            noun = (self.other_protocol or protocol).__name__
            raise RecipeError(f"{self.key}: {name!r} does not implement {noun}: it lacks {', '.join(missing)}")

    def _protocol_of(self, target: Any) -> type | None:
        if self.protocol is None or self.other_protocol is None:
            return self.protocol
        only_other = set(members_of(self.other_protocol)) - set(members_of(self.protocol))
        return self.other_protocol if any(hasattr(target, member) for member in only_other) else self.protocol


@contextlib.contextmanager
def users_code(context: str) -> Iterator[None]:
    """Turn every error of the user's code into a RecipeError that names the place in the code."""
    try:
        yield
    except MidflightError:
        raise
    except Exception as error:
        raise RecipeError(f"{context}: {reason_of(error)}") from error


def members_of(protocol: type) -> list[str]:
    """Return the names that a protocol requires, including inherited ones."""
    bases = [base for base in reversed(protocol.__mro__) if getattr(base, "_is_protocol", False)]
    names = dict.fromkeys(name for base in bases for name in (*vars(base), *inspect.get_annotations(base)))
    return [name for name in names if not name.startswith("_")]


def own_options(section: Section) -> dict[str, Any]:
    """Return the options of the user's own implementation; empty for a built-in one."""
    return section.options if isinstance(section, OwnSection) else {}


def options_of(section: Section) -> dict[str, Any]:
    """Return the options of the user's own implementation, or the keys of the section for a built-in one."""
    return own_options(section) or keys_of(section)


def keys_of(section: Section) -> dict[str, Any]:
    """Return the keys of a section except `type` and `options`."""
    return {key: value for key, value in section if key not in ("type", "options")}


def _is_set_later(target: type, member: str) -> bool:
    """True if instances have an attribute that their class lacks: declared, assigned in `__init__` or delegated."""
    for base in target.__mro__:
        constructor = getattr(vars(base).get("__init__"), "__code__", None)
        if member in inspect.get_annotations(base) or (constructor and member in constructor.co_names):
            return True
    return hasattr(target, "__getattr__")
