# SPDX-License-Identifier: Apache-2.0
"""Identifiers are drawn from the operating system for many at a time; no thread and no process gets one twice."""

from __future__ import annotations

import os
import unittest
import uuid
from concurrent import futures

from moorage import randomness


def draw(number: int) -> list[str]:
    return [randomness.new_uuid() for _ in range(number)]


class UuidTests(unittest.TestCase):
    def test_threads_get_different_ones_of_version_4(self) -> None:
        # Each thread meets the end of what was drawn.
        number = 3 * randomness._DRAWN
        with futures.ThreadPoolExecutor(8) as pool:
            found = [each for some in pool.map(draw, [number] * 8) for each in some]
        self.assertEqual(8 * number, len(set(found)))
        for each in found:
            made = uuid.UUID(each)
            self.assertEqual((str(made), made.version, made.variant), (each, 4, uuid.RFC_4122))

    def test_a_forked_process_draws_its_own(self) -> None:
        randomness.new_uuid()
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, "\n".join(draw(50)).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, encoding="ascii") as pipe:
            of_child = pipe.read().split("\n")
        os.waitpid(child, 0)
        self.assertEqual(50, len(of_child))
        self.assertEqual(set(), {*of_child}.intersection(draw(randomness._DRAWN)))


if __name__ == "__main__":
    unittest.main()
