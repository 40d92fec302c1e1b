# SPDX-License-Identifier: Apache-2.0
"""What Acme brings beside its plugins; the entry point in setup.cfg names it. Nothing is imported before it is used."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    options="acme_moorage.options",
    migrations="acme_moorage.migrations:MIGRATIONS",
    routes=("acme_moorage.routes",),
    collectors=("acme_moorage.metrics:LicenceCollector",),
    commands={"licence list": "acme_moorage.commands:LicenceList"},
)
