# SPDX-License-Identifier: Apache-2.0
"""Instance tracking by the real roles: told, lost, switched off."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from moorage import errors
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.instances.create import StoreClaimer
from moorage.instances.move_claims import MoveClaimer
from moorage.scheduling.interface import ClaimResult, InstanceRecord, RequestSpec
from moorage_plugins.compute.instances import ComputeInstances
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until


class TrackingTests(unittest.TestCase):
    def test_what_agents_do_is_known_to_every_scheduler(self) -> None:
        plane = Plane(self).up(schedulers=2)
        made = [plane.create(2)["uuid"] for _ in range(6)]
        for uuid in made:
            plane.wait_status(uuid, "active")
        plane.deleter().delete(made[0])
        plane.wait_status(made[0], "gone")
        plane.wait_agreement()
        self.assertEqual(set(plane.view("scheduler-2")), set(made[1:]))

    def test_a_scheduler_that_starts_hears_of_all_hosts_soon(self) -> None:
        plane = Plane(self).up(("h1", "h2"))
        role = plane.roles["scheduler-1"]
        hosts = role._scheduler.view.snapshot().rows_of_host
        silent = role._scheduler._ranker._freshen.__self__
        wait_until(lambda: silent._tracker.silent(hosts) == [], "both have spoken", SOON)


class OptOutTests(unittest.TestCase):
    """The opt-out, counted: nothing is loaded, sent, taken or attached."""

    def test_switched_off(self) -> None:
        plane = Plane(
            self,
            scheduling__track_instance_changes=False,
            scheduling__enabled_filters=["compute", "capacity"],
            scheduling__scheduler_instance_sync_interval=1,
            # Every twelfth sweep of an agent reads its instances, too.
            agent__sweep_interval=3600,
        )
        with (
            mock.patch.object(ComputeInstances, "all", autospec=True, side_effect=AssertionError) as loads,
            mock.patch.object(ComputeInstances, "by_hosts", autospec=True, return_value=[]) as reads,
        ):
            plane.up(("h1", "h2"))
            # Only what the agents must know themselves when they start.
            self.assertEqual(reads.call_count, 2)
            made = [plane.create(4)["uuid"] for _ in range(4)]
            for uuid in made:
                plane.wait_status(uuid, "active")
            for agent in ("h1", "h2"):
                plane.roles[agent].sync_instances()
                plane.roles[agent].report_instances()
            told = {"uuid": "stranger", "host": "h1", "node": "h1-node-0", "flavorid": "f", "resources": {"VCPU": 1}}
            sender = plane.client.sender
            for method, args in (
                ("update_instance_info", {"host_name": "h1", "instance_or_list": [told]}),
                ("sync_instance_info", {"host_name": "h1", "instance_uuids": ["x"]}),
                ("delete_instance_info", {"host_name": "h1", "instance_uuid": made[0]}),
            ):
                sender.call("scheduler", method, args)
            self.assertEqual(plane.view(), {})
            self.assertEqual(list(plane.roles["scheduler-1"]._scheduler.view.snapshot().num_instances), [0, 0])
            # The room is counted all the same: 16 on each of two nodes.
            for uuid in [plane.create(4)["uuid"] for _ in range(4)]:
                plane.wait_status(uuid, "active")
            with self.assertRaises(errors.NoValidHost):
                plane.create(1)
            self.assertEqual((loads.call_count, reads.call_count), (0, 2))
        tracking = {"update_instance_info", "delete_instance_info", "sync_instance_info", "claimed_instances"}
        self.assertEqual([method for _, method in plane.fanouts if method in tracking | {"sync_instances"}], [])
        self.assertEqual([method for _, method, _ in plane.casts if method == "report_instances"], [])

    def test_a_filter_that_needs_instances_stops_the_start_and_names_both_options(self) -> None:
        plane = Plane(self, scheduling__track_instance_changes=False)
        plane.enrol({"h1": 1})
        with self.assertRaises(errors.ConfigError) as caught:
            plane.start(SchedulerRole(), "scheduler-1")
        self.assertIn("track_instance_changes", caught.exception.message)
        self.assertIn("enabled_filters", caught.exception.message)
        self.assertIn("same_host", caught.exception.message)


class DeclaredFieldTests(unittest.TestCase):
    """What filters declared is known of an instance from its claim on, also when no message of its agent ever arrives."""

    #: They have another value before the claim has committed, or before the build has ended.
    CHANGING = ("created_at", "status")

    def fields(self, record: InstanceRecord) -> dict[str, Any]:
        # The id of the request is kept when the build has ended: bookkeeping of ours.
        known = {name: each for name, each in record.fields.items() if name != "last_request_id"}
        return known | {name: "present" for name in self.CHANGING if name in known}

    def test_a_filter_sees_no_less_between_claim_and_message_than_after_it(self) -> None:
        plane = Plane(self, scheduling__instance_fields=["*"])
        plane.lose = lambda method: method == "update_instance_info"  # type: ignore[method-assign]
        plane.up(("h1", "h2"), schedulers=2)
        during: list[InstanceRecord] = []

        def looking(original: Any) -> Any:
            def claim(claimer: Any, spec: RequestSpec, *args: Any) -> ClaimResult:
                during.extend(plane.view().values())
                found: ClaimResult = original(claimer, spec, *args)
                return found

            return claim

        for kind in (StoreClaimer, MoveClaimer):
            patch = mock.patch.object(kind, "claim", looking(kind.claim))
            patch.start()
            self.addCleanup(patch.stop)
        made = plane.create(
            scheduler="scheduler-1", name="db", hints={"licence": ["gold"]}, image={"id": "i"}, availability_zone="z"
        )
        wait_until(lambda: made["uuid"] in plane.view("scheduler-2"), "the message of the other scheduler", SOON)
        views = [plane.view(name)[made["uuid"]] for name in ("scheduler-1", "scheduler-2")]
        plane.wait_status(made["uuid"], "active")
        stored = self.fields(plane.records()[made["uuid"]])
        self.assertLessEqual({"name", "hints", "image", "created_at", "status"}, stored.keys())
        self.assertEqual([self.fields(each) for each in (*during, *views)], [stored] * 3)
        # While it moves, its destination is reserved under another uuid; the old place is not that of a new instance.
        during.clear()
        plane.ask(
            "move_instance",
            {"instance_uuid": made["uuid"], "operation": "live_migrate", "wanted": {}, "request_id": "move"},
            scheduler="scheduler-1",
        )
        self.assertEqual(len(during), 2)
        for each in during:
            self.assertLessEqual({"name", "hints", "image", "created_at", "status"}, set(each.fields))
            self.assertEqual(each.fields["name"], "db")


LICENSE_FILTER = """
from moorage.scheduling.interface import HostFilter

class LicenseFilter(HostFilter):
    api_version = (1, 0)
    needs_instances = True
    instance_fields = ("hints",)

    def host_passes(self, host_state, spec_obj):
        wanted = set(spec_obj.hints.get("licence", ()))
        return all(wanted.isdisjoint(each.fields["hints"].get("licence", ())) for each in host_state.instances.values())
"""


class NewFieldTests(unittest.TestCase):
    def test_a_filter_of_somebody_else_that_declares_a_new_field_works_without_a_change_of_the_core(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        Path(folder.name, "licences.py").write_text(LICENSE_FILTER)
        info = Path(folder.name, "licences-1.0.dist-info")
        info.mkdir()
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: licences\nVersion: 1.0\n")
        info.joinpath("entry_points.txt").write_text("[moorage.filters]\nlicence = licences:LicenseFilter\n")
        sys.path.insert(0, folder.name)
        self.addCleanup(sys.path.remove, folder.name)
        self.addCleanup(sys.modules.pop, "licences", None)
        plane = Plane(self, scheduling__enabled_filters=["compute", "capacity", "licence"])
        # One is there when the scheduler starts and is loaded, the others are told by their agents.
        plane.up(("h1", "h2", "h3"))
        plane.stop("scheduler-1")
        plane.start(SchedulerRole(), "scheduler-1")
        hosts = []
        for number in range(3):
            made = plane.create(hints={"licence": ["gold"]})
            hosts.append(made["host"])
            plane.wait_status(made["uuid"], "active")
            if number == 1:
                plane.wait_agreement()
                plane.stop("scheduler-1")
                plane.start(SchedulerRole(), "scheduler-1")
        self.assertEqual(sorted(hosts), ["h1", "h2", "h3"])
        with self.assertRaises(errors.NoValidHost):
            plane.create(hints={"licence": ["gold"]})
        plane.create(hints={"licence": ["silver"]})
