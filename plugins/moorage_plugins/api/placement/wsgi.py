# SPDX-License-Identifier: Apache-2.0
"""For WSGI servers: ``moorage_plugins.api.placement.wsgi:application``."""

from __future__ import annotations

from moorage.wsgi import DialectCallable

__all__ = ["application"]

application = DialectCallable("placement")
