# SPDX-License-Identifier: Apache-2.0
"""Builds an instance with the driver redfish in a process of its own, which a test pauses and kills.

Arguments: the state folder, the machines as JSON, the instance, its node, the token. Writes ``ran``, or the driver's error.
"""

from __future__ import annotations

import json
import sys

from moorage.drivers.interface import DriverError, Machine, Workload
from tests.functional.compute.bmcs import make_driver


def main() -> None:
    state_dir, machines, instance, node, token = sys.argv[1:]
    driver = make_driver(state_dir, [Machine(**each) for each in json.loads(machines)])
    try:
        driver.spawn(Workload(uuid=instance, node=node), int(token))
    except DriverError as error:
        sys.stdout.write(f"{error}\n")
    else:
        sys.stdout.write("ran\n")


if __name__ == "__main__":
    main()
