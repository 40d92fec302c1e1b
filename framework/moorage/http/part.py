# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the HTTP server and its callers."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    options="moorage.http.options",
    checks={
        "callers": "moorage.http.middleware:check",
    },
)
