# SPDX-License-Identifier: Apache-2.0
"""The routes of a path."""

from __future__ import annotations

import unittest

from moorage.http.route_table import RouteTable
from moorage.http.routes import Request, Response, Route


def handler(request: Request) -> Response:
    return Response()


class RouteTableTests(unittest.TestCase):
    def find(self, paths: list[str], path: str) -> tuple[str, dict[str, str]] | None:
        found = RouteTable([Route("GET", each, handler) for each in paths]).find(path)
        return None if found is None else (found[0].template, found[1])

    def test_finds_a_path_and_its_parameters(self) -> None:
        paths = ["/nodes", "/nodes/{uuid}", "/nodes/{uuid}/ports/{port}"]
        self.assertEqual(("/nodes", {}), self.find(paths, "/nodes"))
        self.assertEqual(("/nodes/{uuid}", {"uuid": "a"}), self.find(paths, "/nodes/a"))
        self.assertEqual(
            ("/nodes/{uuid}/ports/{port}", {"uuid": "a", "port": "b"}), self.find(paths, "/nodes/a/ports/b")
        )

    def test_a_literal_segment_wins_over_a_parameter_in_any_order(self) -> None:
        paths = ["/nodes/{uuid}", "/nodes/detail"]
        for order in (paths, paths[::-1]):
            self.assertEqual(("/nodes/detail", {}), self.find(order, "/nodes/detail"))

    def test_goes_back_to_a_parameter_where_the_literal_leads_nowhere(self) -> None:
        paths = ["/v3/volumes/detail", "/v3/{project}/volumes", "/v3/{project}/volumes/{uuid}"]
        self.assertEqual(("/v3/{project}/volumes", {"project": "volumes"}), self.find(paths, "/v3/volumes/volumes"))
        self.assertEqual(
            ("/v3/{project}/volumes/{uuid}", {"project": "p", "uuid": "u"}), self.find(paths, "/v3/p/volumes/u")
        )

    def test_no_route_has_an_empty_parameter_or_another_number_of_segments(self) -> None:
        for path in ("/nodes/", "/nodes//", "/nodes/a/b", "nodes/a", "", "/"):
            with self.subTest(path=path):
                self.assertIsNone(self.find(["/nodes/{uuid}"], path))

    def test_two_templates_of_one_path_are_a_mistake(self) -> None:
        with self.assertRaisesRegex(ValueError, "are the same"):
            self.find(["/nodes/{uuid}", "/nodes/{name}"], "/nodes/a")
