# SPDX-License-Identifier: Apache-2.0
"""Coordination alone: each of several workers does its part of the jobs. Give it zookeeper://host:2181 and start it twice."""

from __future__ import annotations

import sys

from moorage.coordination.facade import HashRing

URL = sys.argv[1] if len(sys.argv) > 1 else "memory://"
JOBS = [f"job-{number}" for number in range(1000)]

first, second = HashRing(URL, "reports"), HashRing(URL, "reports")
parts = [ring.get_subset(JOBS) for ring in (first, second)]
print(f"together {len(set(parts[0]) | set(parts[1]))} of {len(JOBS)}, twice {len(set(parts[0]) & set(parts[1]))}")
print("each has some:", all(len(part) > 200 for part in parts))

second.stop()
left = first.get_subset(JOBS)
print(f"the one that is left has {len(left)}")
for job in left[:2]:
    # Asked before each: whoever is not certainly a member any more must not begin another job.
    if first.holds("reports"):
        print(f"{job} is done")
first.stop()
print(f"who has left has {len(first.get_subset(JOBS))}")
