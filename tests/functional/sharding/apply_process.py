# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan in a process of its own, one small batch after another, and says so; to be killed in the middle."""

from __future__ import annotations

import sys

from moorage.db import Database
from tests.functional.sharding.case import make_plans

if __name__ == "__main__":
    url, plan, way = sys.argv[1:]
    plans = make_plans(Database(url), batch=3)
    advance = plans.apply if way == "apply" else plans.rollback
    while (progress := advance(plan, 3)).remaining:
        print(progress.remaining, flush=True)  # noqa: T201
    print("done", flush=True)  # noqa: T201
