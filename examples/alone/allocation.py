# SPDX-License-Identifier: Apache-2.0
"""Allocation alone: claims that never add up to more than there is, whoever else claims at the same time."""

from __future__ import annotations

import sys
import uuid

from moorage import errors, options
from moorage.allocation.interface import STORES, ClaimRequest, InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.db import Database, migrations

database = Database(sys.argv[1] if len(sys.argv) > 1 else "sqlite:///claims.sqlite")
migrations.upgrade_all(database)
store = STORES.load("sql").build(conf=options.defaults(), database=database, clock=SystemClock())

machine = str(uuid.uuid4())
store.ensure_providers([ResourceProvider(machine, "node-1", inventories=(InventoryItem("VCPU", total=8),))])
tenants = [str(uuid.uuid4()) for _ in range(3)]
for tenant in tenants:
    try:
        store.claim(ClaimRequest(tenant, {machine: {"VCPU": 3}}, request_id=f"for {tenant}"))
        print("3 VCPU are claimed")
    except errors.CapacityExceeded as error:
        print(f"refused ({error.code})")
store.release(tenants[0])
store.claim(ClaimRequest(tenants[2], {machine: {"VCPU": 3}}, request_id="again"))
(usage,) = store.usages()
print(f"{usage.provider.name} has {usage.used['VCPU']} VCPU in use")
