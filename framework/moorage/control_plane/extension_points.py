# SPDX-License-Identifier: Apache-2.0
"""Collects the extension points of all parts, for ``moorage plugin``, the log and the upgrade check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moorage.extensions import ExtensionPoint, SurveyResult
from moorage.part import parts

__all__ = ["extension_points", "survey"]


def extension_points() -> Sequence[ExtensionPoint[Any]]:
    """Returns the extension points of the interfaces of all parts, part by part."""
    found = []
    for part in parts():
        if part.declared.interface:
            # A module is what an entry point without an object names.
            declared = vars(part.load(part.declared.interface)).values()
            found += [each for each in declared if isinstance(each, ExtensionPoint)]
    return found


def survey() -> list[SurveyResult]:
    """What is installed in all groups; imports it."""
    return [finding for point in extension_points() for finding in point.survey()]
