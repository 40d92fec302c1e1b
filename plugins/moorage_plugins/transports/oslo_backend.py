# SPDX-License-Identifier: Apache-2.0
"""What must be done before oslo_messaging is imported; importing this module does it.

oslo.service, which oslo_messaging imports, chooses eventlet for the whole process unless somebody chose before; here it is told to
choose threads. A backend that the program has chosen already stays as it is.
"""

from __future__ import annotations

from moorage_plugins import eventlet_import  # noqa: F401  (before oslo_service)

# isort: split
from oslo_service import backend

__all__: list[str] = []

if backend.get_backend_type() is None:
    backend.register_backend_default_hook(lambda: backend.BackendType.THREADING)
