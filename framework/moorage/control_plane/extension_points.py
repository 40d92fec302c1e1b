# SPDX-License-Identifier: Apache-2.0
"""All extension points in one table, for ``moorage plugin``, the log and the upgrade check."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any

import moorage
from moorage.extensions import ExtensionPoint, Finding

__all__ = ["EXTENSION_POINTS", "survey"]


def _declared() -> Iterator[ExtensionPoint[Any]]:
    """Those of the module ``interface`` of every family, family by family."""
    for family in pkgutil.iter_modules(moorage.__path__):
        name = f"moorage.{family.name}.interface"
        if family.ispkg and importlib.util.find_spec(name) is not None:
            found = vars(importlib.import_module(name)).values()
            yield from (each for each in found if isinstance(each, ExtensionPoint))


EXTENSION_POINTS: Sequence[ExtensionPoint[Any]] = tuple(_declared())


def survey() -> list[Finding]:
    """What is installed in all groups; imports it."""
    return [finding for point in EXTENSION_POINTS for finding in point.survey()]
