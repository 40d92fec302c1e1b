# SPDX-License-Identifier: Apache-2.0
"""Files of nodes: what they say, and what is refused by its line."""

from __future__ import annotations

import gzip
import pathlib
import tempfile
import unittest
import uuid

import hypothesis
from hypothesis import strategies as st

from moorage import errors
from moorage.fleet import importer
from moorage.fleet.interface import InventoryItem, NodeSpec, uuid_of_name

OPENB = (
    '{"uuid": "d545a2b1-969c-5f12-9207-4016a02dabb9", "name": "n", "cluster": "P100", "vcpus": 64, "memory_mb": 1024, '
    '"gpus": 2, "gpu_model": "P100"}\n'
)


class UuidTests(unittest.TestCase):
    @hypothesis.given(st.text(min_size=1, max_size=300))
    def test_the_uuid_of_a_name_is_the_one_of_version_5(self, name: str) -> None:
        namespace = uuid.UUID("6ddc1d1c-2b80-5d0a-9e4e-5f3a1f6f0c53")
        self.assertEqual(str(uuid.uuid5(namespace, name)), uuid_of_name(name))


class TestReading(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "nodes"

    def read(self, text: str) -> list[NodeSpec]:
        self.path.write_text(text)
        return list(importer.read_nodes(self.path))

    def refusal(self, text: str) -> str:
        with self.assertRaises(errors.InvalidInput) as caught:
            self.read(text)
        return caught.exception.message

    def test_openb(self) -> None:
        (spec,) = self.read(OPENB)
        self.assertEqual(("d545a2b1-969c-5f12-9207-4016a02dabb9", "n", "P100"), (spec.uuid, spec.name, spec.shard))
        self.assertEqual({"gpu_model": "P100"}, spec.properties)
        found = {each.resource_class: each.total for each in spec.inventories}
        self.assertEqual({"VCPU": 64, "MEMORY_MB": 1024, "PGPU": 2}, found)

    def test_our_own_formats_agree_and_a_node_without_uuid_keeps_the_one_of_its_name(self) -> None:
        (line,) = self.read('{"name": "a", "host": "h", "inventories": {"VCPU": 8, "CUSTOM_FPGA": {"total": 1}}}\n')
        (row,) = self.read("name,host,vcpus,CUSTOM_FPGA\na,h,8,1\n")
        self.assertEqual(line, row)
        self.assertEqual(uuid_of_name("a"), row.uuid)
        self.assertEqual((InventoryItem("VCPU", 8), InventoryItem("CUSTOM_FPGA", 1)), row.inventories)

    def test_an_empty_field_gives_nothing_and_zero_removes(self) -> None:
        (row,) = self.read("name,host,vcpus,gpus\na,,,0\n")
        (line,) = self.read('{"name": "a", "inventories": {"PGPU": null}}\n')
        self.assertEqual(line, row)
        self.assertEqual({"uuid": uuid_of_name("a"), "name": "a", "inventories": {"PGPU": None}}, importer.to_json(row))
        (bare,) = self.read('{"name": "a"}\n')
        self.assertEqual({"uuid": uuid_of_name("a"), "name": "a"}, importer.to_json(bare))

    def test_what_is_written_reads_back_the_same(self) -> None:
        (spec,) = self.read(OPENB)
        self.assertEqual(spec, importer.from_json(importer.to_json(spec)))

    def test_pages_have_all_nodes_in_the_order_of_their_uuids(self) -> None:
        specs = [NodeSpec(str(uuid.uuid4()), f"n{number}") for number in range(2 * importer._PAGE + 1)]
        pages = list(importer.to_pages(specs))
        self.assertEqual([importer._PAGE, importer._PAGE, 1], [len(page) for page in pages])
        expected = [importer.to_json(spec) for spec in sorted(specs, key=lambda spec: spec.uuid)]
        self.assertEqual(expected, [node for page in pages for node in page])

    def test_gz(self) -> None:
        path = self.path.with_suffix(".gz")
        path.write_bytes(gzip.compress(OPENB.encode()))
        self.assertEqual("n", next(importer.read_nodes(path)).name)

    def test_a_wrong_line_is_named_with_what_is_wrong(self) -> None:
        for text, *parts in (
            ("name,vcpus\na,-1\n", "line 2", "VCPU", "-1"),
            ("name,vcpus\na,1\nb,two\n", "line 3", "vcpus", "two"),
            ("name,vcpus\na,1\na,1\n", "line 3", "a", "line 2"),
            ("name,vcpus\na\n", "line 2", "as many fields"),
            ("name,colour\na,red\n", "line 1", "colour"),
            ("vcpus\n1\n", "line 1", "name"),
            ('{"name": "a"}\n{"name": 7}\n', "line 2", "name"),
            ('{"name": "a", "colour": 1}\n', "line 1", "colour"),
            ('{"name": "a", "inventories": {"VCPU": 1.5}}\n', "line 1", "VCPU", "1.5"),
            ('{"name": "a", "inventories": {"vcpu": 1}}\n', "line 1", "vcpu"),
            ('{"name": "a", "inventories": {"VCPU": {"total": 1, "reserved": 2}}}\n', "line 1", "reserved"),
            ('{"name": "a", "uuid": "x"}\n', "line 1", "uuid"),
            ('{"name": \n', "line 1"),
        ):
            with self.subTest(text):
                message = self.refusal(text)
                for part in parts:
                    self.assertIn(part, message)

    def test_a_missing_file_is_told_in_words(self) -> None:
        with self.assertRaises(errors.InvalidInput) as caught:
            list(importer.read_nodes(self.path / "nowhere"))
        self.assertIn("cannot be read", caught.exception.message)
