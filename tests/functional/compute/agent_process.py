# SPDX-License-Identifier: Apache-2.0
"""A compute agent as a process of its own: URL, state folder, epoch, seconds of a build. Ends when its input does.

A build of 77 seconds lasts until the input has a line.
"""

from __future__ import annotations

import logging
import sys

from tests.unit.compute.agent_tests import Fleet


def main() -> None:
    url, state_dir, epoch, delay = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, force=True)
    fleet = Fleet(url, state_dir, build_delay=float(delay))
    agent = fleet.agent(int(epoch))
    agent.start()
    sys.stdin.readline()
    fleet.clock.gate.set()
    sys.stdin.read()
    agent.stop()


if __name__ == "__main__":
    main()
