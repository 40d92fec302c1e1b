# SPDX-License-Identifier: Apache-2.0
"""To be imported before libraries that import eventlet (they do it in any case, and patch nothing).

eventlet warns whoever imports it that it is deprecated; users of Moorage can do nothing about that.
"""

from __future__ import annotations

import warnings

__all__: list[str] = []

# For good, since the warnings' state belongs to all threads and could not be put back safely.
warnings.filterwarnings("ignore", message=r"\s*Eventlet is deprecated")
