# SPDX-License-Identifier: Apache-2.0
"""Rings beside each other: build, subset, balance, movement, and fetching one's own objects; printed as one JSON object.

``python benchmarks/coordination.py [--members 10,100,1000] [--objects 10000,100000,1000000] [--repeat 3]``

Compared are Moorage's ring (md5, which has Sahara's owners, and xxh3), the naive md5 loop that Sahara has, and tooz's HashRing
where tooz is installed. ``subset`` is the time in which one member finds its own among all objects. The naive loop and tooz are
linear in the objects; where they would run for minutes they are measured on fewer objects and scaled, which is marked. ``fetch``
is one engine's share of rows in SQLite: by ranges of stored positions, against reading all ids and keeping its own. Times are
medians of ``--repeat`` runs, ratios are taken within one run.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import json
import random
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

import sqlalchemy as sa

from moorage.db.ranges import within
from moorage.ring import Ring

try:
    from tooz import hashring
except ImportError:
    hashring = None

REPLICAS = 40
#: Seconds that one measurement of a slow contender may take before it is scaled.
PATIENCE = 5.0


class Naive:
    """The specification's ring in its plainest form; Sahara's."""

    def __init__(self, members: Sequence[str]) -> None:
        self.points = {self.hash(f"{member}:{number}"): member for member in members for number in range(REPLICAS)}
        self.sorted = sorted(self.points)

    @staticmethod
    def hash(text: str) -> int:
        return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16)

    def subset(self, keys: Sequence[str], me: str) -> list[str]:
        mine = []
        for key in keys:
            place = bisect.bisect(self.sorted, self.hash(key))
            if self.points[self.sorted[place if place < len(self.sorted) else 0]] == me:
                mine.append(key)
        return mine


def median(work: Callable[[], object], repeat: int) -> float:
    taken = []
    for _ in range(repeat):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def scaled(work: Callable[[Sequence[str]], object], keys: Sequence[str], repeat: int) -> tuple[float, bool]:
    """Seconds for all keys; measured on a part of them, and scaled, when it would take too long."""
    part = keys[: min(len(keys), 10_000)]
    first = median(lambda: work(part), 1)
    if first * len(keys) / len(part) <= PATIENCE:
        return median(lambda: work(keys), repeat), False
    return median(lambda: work(part), repeat) * len(keys) / len(part), len(part) < len(keys)


def measure(names: Sequence[str], keys: Sequence[str], repeat: int) -> dict[str, object]:
    me = names[0]
    rings = {function: Ring(names, REPLICAS, function) for function in ("md5", "xxh3")}
    seconds = {function: median(lambda r=ring: r.subset(keys, me), repeat) for function, ring in rings.items()}
    naive = Naive(names)
    assert naive.subset(keys[:5000], me) == rings["md5"].subset(keys[:5000], me), "md5 must have Sahara's owners"
    naive_seconds, naive_scaled = scaled(lambda part: naive.subset(part, me), keys, repeat)
    found: dict[str, object] = {
        "members": len(names),
        "objects": len(keys),
        "subset_s": {**{name: round(each, 5) for name, each in seconds.items()}, "naive": round(naive_seconds, 5)},
        "naive_scaled": naive_scaled,
        "naive/md5": round(naive_seconds / seconds["md5"], 1),
        "naive/xxh3": round(naive_seconds / seconds["xxh3"], 1),
    }
    if hashring is not None:
        theirs = hashring.HashRing(list(names), partitions=REPLICAS)
        wanted = me.encode()
        tooz_seconds, tooz_scaled = scaled(
            lambda part: [key for key in part if wanted in theirs.get_nodes(key.encode())], keys, 1
        )
        found |= {
            "tooz_s": round(tooz_seconds, 4),
            "tooz_scaled": tooz_scaled,
            "tooz/md5": round(tooz_seconds / seconds["md5"], 1),
            "tooz/xxh3": round(tooz_seconds / seconds["xxh3"], 1),
        }
    return found


def build(names: Sequence[str], repeat: int) -> dict[str, object]:
    found: dict[str, object] = {"members": len(names)}
    for function in ("md5", "xxh3"):
        found[function] = round(median(lambda f=function: Ring(names, REPLICAS, f), repeat), 5)
    found["naive"] = round(median(lambda: Naive(names), repeat), 5)
    if hashring is not None:
        found["tooz"] = round(median(lambda: hashring.HashRing(list(names), partitions=REPLICAS), repeat), 5)
    return found


def quality(names: Sequence[str], keys: Sequence[str]) -> dict[str, object]:
    """Balance (busiest by mean) and movement (by the ideal) of one join."""
    found: dict[str, object] = {"members": len(names)}
    for replicas in (40, 160):
        before = Ring(names, replicas).owners(keys)
        after = Ring([*names, "one-more"], replicas).owners(keys)
        moved = sum(old != new for old, new in zip(before, after, strict=True)) / len(keys)
        found[f"replicas_{replicas}"] = {
            "busiest/mean": round(max(Counter(before).values()) * len(names) / len(keys), 2),
            "moved/ideal": round(moved * (len(names) + 1), 2),
        }
    return found


def fetch(names: Sequence[str], keys: Sequence[str], repeat: int) -> dict[str, object]:
    """Seconds of one engine for its own objects: by ranges, and by reading everything."""
    table = sa.table("objects", sa.column("id"), sa.column("position"))
    ring = Ring(names, REPLICAS)
    me = names[0]
    with tempfile.TemporaryDirectory(prefix="moorage-benchmark-") as folder:
        engine = sa.create_engine(f"sqlite:///{folder}/objects.sqlite")
        with engine.begin() as tx:
            tx.exec_driver_sql("CREATE TABLE objects (id TEXT PRIMARY KEY, position BIGINT)")
            tx.exec_driver_sql(
                "INSERT INTO objects VALUES (?, ?)", list(zip(keys, ring.positions(keys).tolist(), strict=True))
            )
            tx.exec_driver_sql("CREATE INDEX ix_objects_position ON objects (position)")

        def by_ranges() -> list[str]:
            query = sa.select(table.c.id).where(within(table.c.position, ring.ranges(me)))
            with engine.connect() as tx:
                return ring.subset(list(tx.execute(query).scalars()), me)

        def by_reading_all(subset: Callable[[Sequence[str]], list[str]]) -> list[str]:
            with engine.connect() as tx:
                return subset(list(tx.execute(sa.select(table.c.id)).scalars()))

        naive = Naive(names)
        assert sorted(by_ranges()) == sorted(by_reading_all(lambda all_of_them: ring.subset(all_of_them, me)))
        ranges = median(by_ranges, repeat)
        everything = median(lambda: by_reading_all(lambda all_of_them: naive.subset(all_of_them, me)), repeat)
        vectors = median(lambda: by_reading_all(lambda all_of_them: ring.subset(all_of_them, me)), repeat)
        engine.dispose()
    return {
        "members": len(names),
        "objects": len(keys),
        "ranges_s": round(ranges, 5),
        "all_naive_s": round(everything, 4),
        "all_md5_s": round(vectors, 4),
        "all_naive/ranges": round(everything / ranges, 1),
        "all_md5/ranges": round(vectors / ranges, 1),
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--members", type=numbers, default=[10, 100, 1000])
    parser.add_argument("--objects", type=numbers, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    chance = random.Random(1)
    keys = [str(uuid.UUID(int=chance.getrandbits(128))) for _ in range(max(arguments.objects))]
    report: dict[str, list[object]] = {"build": [], "quality": [], "subset": [], "fetch": []}
    for count in arguments.members:
        names = [f"moorage.{uuid.UUID(int=chance.getrandbits(128))}.1.0.1.1000" for _ in range(count)]
        report["build"].append(build(names, arguments.repeat))
        report["quality"].append(quality(names, keys[:100_000]))
        for size in arguments.objects:
            report["subset"].append(measure(names, keys[:size], arguments.repeat))
    names = [f"moorage.{uuid.UUID(int=chance.getrandbits(128))}.1.0.1.1000" for _ in range(100)]
    report["fetch"].append(fetch(names, keys[: min(len(keys), 300_000)], arguments.repeat))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
