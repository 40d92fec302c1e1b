# SPDX-License-Identifier: Apache-2.0
"""The commands of sharding, against a whole control plane."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import signal
import sqlite3
import subprocess
import tempfile
import unittest
import uuid
from typing import Any

import requests

from moorage import client
from moorage.cli import main as cli
from moorage.client.baremetal import ShardConsumer
from tests import servers
from tests.commands import in_process
from tests.forking import Command


class TestCommands(unittest.TestCase):
    folder: pathlib.Path
    state: pathlib.Path

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory(prefix="moorage-test-")
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        cls.state = cls.folder / "state"
        words = ["up", "--state-dir", str(cls.state), "--bind", "127.0.0.1:0", "--schedulers", "1", "--agents", "1"]
        process = Command(words, cls.folder / "stderr")
        cls.addClassCleanup(cls.end, process)
        if "is ready" not in process.stdout.readline():
            raise AssertionError("moorage up did not start")

    @staticmethod
    def end(process: Command) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()

    def run_command(self, *words: str, status: int = 0) -> str:
        found, out, err = in_process(cli.main, [*words, "--state-dir", str(self.state)])
        self.assertEqual(status, found, out + err)
        return out if status in (0, 2) else out + err

    def table(self, *words: str, status: int = 0) -> Any:
        return json.loads(self.run_command(*words, "-f", "json", status=status))

    def test_from_enrolment_to_taking_back(self) -> None:
        file = self.folder / "nodes.csv"
        lines = [f"n{number:02},{'east' if number < 9 else ''}" for number in range(12)]
        file.write_text("\n".join(["name,shard", *lines]) + "\n")
        self.run_command("node", "import", str(file))
        self.assertEqual({"east": 9, None: 3}, {row["name"]: row["count"] for row in self.table("shard", "list")})
        self.assertEqual(9, len(self.table("node", "list", "--sharded")))
        self.assertEqual(
            ["n09", "n10", "n11"], sorted(row["name"] for row in self.table("node", "list", "--unsharded"))
        )
        self.assertIn("3 of 12 nodes have no shard", self.run_command("shard", "verify", status=1))
        self.check_pages()

        # A plan says what it would do, and ends with 2 while there is something to do.
        plan = self.table("shard", "plan", "--shards", "east,west", "--keep", "n00", status=2)
        self.assertEqual((6, 6, True), (plan["moves"], plan["lower_bound"], plan["change_needed"]))
        lines_ = {row["name"]: row for row in self.table("shard", "show", plan["plan"])}
        self.assertEqual((9, 6, 1), (lines_["east"]["before"], lines_["east"]["after"], lines_["east"]["locked"]))
        moves = self.table("shard", "show", plan["plan"], "--moves")
        self.assertEqual({"pending"}, {row["status"] for row in moves})
        self.assertIn("it has no shard", {row["reason"] for row in moves})
        applied = self.table("shard", "apply", plan["plan"], "--batch", "2")
        self.assertEqual(("applied", 6, 0), (applied["status"], applied["done"], applied["conflicts"]))
        self.assertTrue(self.table("shard", "verify", plan["plan"])["ok"])
        self.run_command("shard", "verify")
        again = self.table("shard", "plan", "--shards", "2")
        self.assertFalse(again["change_needed"])
        self.assertEqual(6, len(self.table("node", "list", "--shard", "west")))

        # What somebody does meanwhile is kept, and said.
        self.assertEqual("south", self.table("node", "set", moves[0]["name"], "--shard", "south")["shard"])
        self.assertIn("means 'no shard'", self.run_command("node", "set", "n00", "--shard", "none", status=1))
        undone = self.table("shard", "rollback", plan["plan"])
        self.assertEqual(("undone", 5, 1), (undone["status"], undone["done"], undone["conflicts"]))
        stuck = self.table("shard", "show", plan["plan"], "--status", "stuck")
        self.assertEqual(["it is in south by now"], [row["note"] for row in stuck])
        self.assertEqual("", self.table("node", "set", moves[0]["name"], "--no-shard")["shard"])
        self.assertEqual(
            3 if moves[0]["source"] is None or moves[0]["source"] == "" else 4,
            len(self.table("node", "list", "--unsharded")),
        )
        self.assertIn(plan["plan"], self.run_command("shard", "show"))
        self.check_other_strategies()
        self.check_the_dialect()

    def test_the_advice_of_the_checks_works_when_it_is_followed(self) -> None:
        names = [f"used-{number}" for number in range(6)]
        file = self.folder / "used.csv"
        file.write_text("\n".join(["name,vcpus,shard", *(f"{name},4,advised" for name in names)]) + "\n")
        self.run_command("node", "import", str(file))
        with contextlib.closing(sqlite3.connect(self.state / "moorage.sqlite", timeout=60)) as database:
            # Three are in use, and have no shard, or one that no query can ask for.
            for number, name in enumerate(names[:3]):
                shard = "a,b" if number == 0 else None
                database.execute(
                    "UPDATE nodes SET instance_uuid = ?, shard = ? WHERE name = ?", (str(uuid.uuid4()), shard, name)
                )
            database.commit()
        said = self.table("shard", "verify", status=1)["problems"]
        self.assertIn("no query can ask for", said.lower())
        planned = None
        # Whatever the sentences say is done as it stands there, with names for what they write in capitals.
        while "moorage shard plan" in said:
            command = re.search(r"moorage (shard plan(?: --shards SHARD,SHARD)?)", said)
            assert command is not None
            words = command[1].replace("SHARD,SHARD", "advised,other").split()
            planned = self.table(*words, *(["--include-instances"] if "SHARD,SHARD" in command[1] else []), status=2)
            self.run_command("shard", "apply", planned["plan"])
            problems = client.connect(**json.loads((self.state / "client.json").read_text())).check_shards()["problems"]
            said = json.dumps(problems)
        self.run_command("shard", "verify")
        assert planned is not None
        self.assertTrue(self.table("shard", "verify", planned["plan"])["ok"])
        self.assertEqual([], self.table("node", "list", "--unsharded"))
        # From shard to shard such a node is not moved, and the reason names what does it.
        refused = self.run_command("node", "set", names[0], "--shard", "west", status=1)
        option = re.search(r"give (--include-instances)", refused)
        assert option is not None
        self.assertEqual("west", self.table("node", "set", names[0], "--shard", "west", option[1])["shard"])
        for name in names:
            self.run_command("node", "set", name, "--shard", "advised", "--include-instances")

    def check_pages(self) -> None:
        """Lists of nodes and hosts begin and end where they are told to, and hold what is asked for."""
        every = [row["uuid"] for row in self.table("node", "list")]
        self.assertEqual(sorted(every), every)
        page = self.table("node", "list", "--limit", "2", "--marker", every[3], "--fields", "uuid,shard")
        self.assertEqual(every[4:6], [row["uuid"] for row in page])
        self.assertEqual({"uuid", "shard"}, set(page[0]))
        self.assertEqual(1, len(self.table("node", "list", "--shard", "east", "--limit", "1")))
        self.assertEqual([], self.table("node", "list", "--maintenance"))
        self.assertIn("no field 'colour'", self.run_command("node", "list", "--fields", "colour", status=1))
        self.assertIn("--limit is 0", self.run_command("host", "list", "--limit", "0", status=1))
        servers.wait_until(lambda: len(self.table("host", "list", "--up", "--fields", "node")) == 12, "all nodes", 60)
        self.assertEqual([], self.table("host", "list", "--down"))
        (one,) = self.table("host", "list", "--node", "n03", "--fields", "uuid,host,enabled")
        self.assertEqual({"uuid", "host", "enabled"}, set(one))
        self.assertEqual(12, len(self.table("host", "list", "--host", one["host"], "--enabled")))

    def check_other_strategies(self) -> None:
        params = self.folder / "params.json"
        rules = {"rules": [{"match": {"name": "n0[0-4]"}, "shard": "first"}], "fallback": "balanced"}
        params.write_text(json.dumps(rules))
        plan = self.table(
            "shard", "plan", "--strategy", "rules", "--params-file", str(params), "--shards", "first,rest", status=2
        )
        lines = {row["name"]: row["after"] for row in self.table("shard", "show", plan["plan"])}
        self.assertEqual((5, 7), (lines["first"], lines["rest"]))
        limited = self.table("shard", "plan", "--shards", "a,b", "--max-moves", "3", "--threshold", "5%", status=2)
        self.assertEqual((3, 9), (limited["moves"], limited["withheld"]))
        ring = self.table(
            "shard", "plan", "--strategy", "hash_ring", "--param", "replicas=10", "--shards", "3", status=2
        )
        self.assertEqual("hash_ring", ring["strategy"])
        self.assertIn(
            "has no parameter", self.run_command("shard", "plan", "--param", "x=1", "--shards", "3", status=1)
        )
        self.assertIn(
            "moorage.shard_strategies", self.run_command("shard", "plan", "--strategy", "no", "--shards", "3", status=1)
        )

    def check_the_dialect(self) -> None:
        """Ports through the command line, and the very same nodes by both doors."""
        data = json.loads((self.state / "client.json").read_text())
        node = self.table("node", "show", "n05")
        given = {"node_uuid": node["uuid"], "address": "52:54:00:00:00:05"}
        session = requests.Session()
        self.addCleanup(session.close)
        session.auth = (data["username"], data["password"])
        session.headers["X-OpenStack-Ironic-API-Version"] = "1.115"
        for resource in ("ports", "portgroups"):
            answer = session.post(f"{data['url']}/baremetal/v1/{resource}", json=given, timeout=60)
            self.assertEqual(201, answer.status_code, answer.text)
        shard = node["shard"]
        self.assertEqual([given["address"]], [row["address"] for row in self.table("port", "list", "--shard", shard)])
        self.assertEqual(1, len(self.table("port", "group", "list", "--shard", f"{shard},x", "--node", "n05")))
        self.assertEqual([], self.table("port", "list", "--shard", "none"))
        api = client.connect(**data)
        self.assertEqual(12, sum(each["count"] for each in api.shards()))
        self.assertEqual([given["address"]], [port["address"] for port in api.ports(shard=shard)])
        mine = ShardConsumer(api.baremetal(), shard)
        names = {row["name"] for row in self.table("node", "list", "--shard", shard)}
        self.assertEqual(names, {each["name"] for each in mine.nodes()})
        wanted = [{"node": name, "shard": "bulk", "was": shard} for name in sorted(names)]
        outcome = api.assign_shards([*wanted, {"node": "n11", "shard": "bulk", "was": "wrong"}])
        self.assertEqual((len(names), 1), (outcome["moved"], len(outcome["conflicts"])))
