# SPDX-License-Identifier: Apache-2.0
"""Two things that must be done before oslo_messaging is imported; importing this module does them.

* oslo.service, which oslo_messaging imports, chooses eventlet for the whole process unless somebody chose before;
  here it is told to choose threads. A backend that the program has chosen already stays as it is.
* oslo_messaging imports eventlet in any case (without patching anything), and eventlet executes the module ``threading``
  a second time. CPython (seen with 3.11) then forgets who waits for the end of the present thread: ``join`` on a thread
  that ran this import never returns. Plugins are imported in such a thread, so eventlet is imported in one that nobody joins.
"""

from __future__ import annotations

import contextlib
import importlib
import threading

from oslo_service import backend

from moorage_plugins import quiet  # noqa: F401  (before eventlet)

__all__: list[str] = []

#: Seconds to wait for eventlet; its import takes tenths of one.
_SECONDS = 20.0


def _import_eventlet() -> None:
    try:
        with contextlib.suppress(Exception):  # whatever is wrong with it, oslo_messaging will say
            patcher = importlib.import_module("eventlet.patcher")
            patcher.original("threading")
            importlib.import_module("eventlet")
    finally:
        _imported.set()


_imported = threading.Event()

if backend.get_backend_type() is None:
    backend.register_backend_default_hook(lambda: backend.BackendType.THREADING)
threading.Thread(target=_import_eventlet, name="import-eventlet", daemon=True).start()
_imported.wait(_SECONDS)
