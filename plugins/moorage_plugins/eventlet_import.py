# SPDX-License-Identifier: Apache-2.0
"""Imports eventlet where it is installed, in a harmless way. Import this module before any module that imports eventlet.

tooz (through futurist) and oslo_messaging import eventlet when it is there, without patching anything:

* It executes the module ``threading`` a second time. CPython (seen with 3.11) then forgets who waits for the end of the present
  thread: ``join`` on a thread that ran this import never returns. Plugins are imported in such a thread, so eventlet is imported
  in one that is never joined.
* At each import it warns that it is deprecated; users of Moorage can do nothing about that.
* It imports dnspython, which takes a quarter of a second, for a resolver that replaces the one of the system. Nothing here
  uses that resolver, so the import happens without it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings

from moorage import threads

__all__: list[str] = []

#: Seconds to wait for eventlet; its import takes tenths of one.
_SECONDS = 20.0
#: The variable with which eventlet leaves its own resolver out.
_NO_RESOLVER = "EVENTLET_NO_GREENDNS"


def _import_eventlet() -> None:
    chosen = os.environ.get(_NO_RESOLVER)
    os.environ[_NO_RESOLVER] = "yes"
    try:
        with contextlib.suppress(Exception):  # whatever is wrong with it, who needs it will say
            patcher = importlib.import_module("eventlet.patcher")
            patcher.original("threading")
            importlib.import_module("eventlet")
    finally:
        # Programs that this process starts must not inherit the choice.
        if chosen is None:
            del os.environ[_NO_RESOLVER]
        else:
            os.environ[_NO_RESOLVER] = chosen
        _imported.set()


_imported = threads.event()
# For good, since the warnings' state belongs to all threads and could not be put back safely.
warnings.filterwarnings("ignore", message=r"\s*Eventlet is deprecated")
threads.thread(_import_eventlet, name="import-eventlet").start()
_imported.wait(_SECONDS)
