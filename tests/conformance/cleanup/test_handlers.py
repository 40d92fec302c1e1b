# SPDX-License-Identifier: Apache-2.0
"""The reference handlers and the kit of cleanup handlers."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any, ClassVar
from unittest import mock

import sqlalchemy as sa

from moorage.cleanup.interface import CleanupHandler
from moorage.db import Database
from moorage.instances.moves import ACTIVATE, PREPARE, REVERT, TRANSFER
from moorage.observers.interface import InstanceDeleted, InstanceFailed
from moorage.services.interface import ServiceIdentity
from moorage.testing.cleanup import CleanupHandlerTests
from moorage.work import tables as work_tables
from moorage.work.operations import SqlOperationStore
from moorage_plugins.block_storage.cleanup import BackupHandler, SnapshotHandler, VolumeHandler
from moorage_plugins.compute.cleanup import InstanceHandler
from moorage_plugins.compute.tables import instances
from moorage_plugins.data_processing import tables as data_tables
from moorage_plugins.data_processing.cleanup import ClusterHandler
from moorage_plugins.data_processing.store import DataStore
from tests.unit.block_storage.storages import SIZE, Storage
from tests.unit.compute.agent_tests import HOST, Fleet


class _BlockStorageCase(CleanupHandlerTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)  # type: ignore[attr-defined]
        self.storage = Storage(f"sqlite:///{folder.name}/test.sqlite", folder.name)
        self.database = self.storage.database
        self.addCleanup(self.database.close)  # type: ignore[attr-defined]
        self.storage.create_tables()

    def tools(self, identity: ServiceIdentity) -> Any:
        return self.storage.tools(identity)

    def status(self, uuid: str) -> str | None:
        return self.storage.status(self.resource_type, uuid)

    def assert_tidy(self, uuid: str) -> None:
        strays = [each for each in self.storage.strays() if each[:2] == (self.resource_type, uuid)]
        assert not strays, strays

    def begin(self, kind: str, uuid: str, identity: ServiceIdentity) -> str:
        """An operation is begun and leaves a part of its file."""
        job = self.storage.start(kind, uuid, identity)
        for held in job.leases:
            each = held.resource_type
            if held.status not in ("deleting", "backing-up", "restoring"):
                path = self.storage.backend.path(each, held.resource_id, held.token)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"half")
        return uuid


class VolumeHandlerTests(_BlockStorageCase, unittest.TestCase):
    resource_type = "volume"
    handler_class: type[CleanupHandler] = VolumeHandler
    expected: ClassVar = {
        "creating": "error",
        "downloading": "error",
        "uploading": "available",
        "deleting": None,
        "backing-up": "available",
        "restoring-backup": "error_restoring",
    }

    def interrupted(self, status: str, identity: ServiceIdentity) -> str:
        service = self.storage.service
        if status in ("creating", "downloading"):
            image = self.storage.image("image", b"x") if status == "downloading" else ""
            return self.begin("volume", service.create_volume(SIZE, image=image).uuid, identity)
        made = service.create_volume(SIZE)
        self.finish("volume", made.uuid)
        if status == "uploading":
            service.upload(made.uuid, "image")
        elif status == "deleting":
            service.delete_volume(made.uuid)
        else:
            backup = service.create_backup(made.uuid)
            if status == "restoring-backup":
                self.finish("backup", backup.uuid)
                service.restore(backup.uuid, made.uuid)
            self.begin("backup", backup.uuid, identity)
            with self.database.write() as tx:
                # The backup's own row is the affair of its own handler.
                self.storage.workers.reset(tx, "backup", backup.uuid)
            return str(made.uuid)
        return self.begin("volume", made.uuid, identity)

    def finish(self, kind: str, uuid: str) -> None:
        self.storage.agent("done").loop.run(self.storage.start(kind, uuid, self.service("done")))

    def test_one_that_is_attached_goes_back_to_its_server(self) -> None:
        made = self.storage.service.create_volume(SIZE)
        self.finish("volume", made.uuid)
        self.storage.service.attach(made.uuid, "server")
        image = self.storage.service.upload(made.uuid, "image")
        self.begin("volume", made.uuid, self.dead)
        self.clean()
        self.assertEqual((self.status(made.uuid), self.storage.status("image", image.uuid)), ("in-use", "killed"))


class SnapshotHandlerTests(_BlockStorageCase, unittest.TestCase):
    resource_type = "snapshot"
    handler_class: type[CleanupHandler] = SnapshotHandler
    expected: ClassVar = {"creating": "error", "deleting": None}

    def interrupted(self, status: str, identity: ServiceIdentity) -> str:
        service, agent = self.storage.service, self.storage.agent("done")
        volume = service.create_volume(SIZE)
        agent.loop.run(self.storage.start("volume", volume.uuid, self.service("done")))
        made = service.create_snapshot(volume.uuid)
        if status == "deleting":
            agent.loop.run(self.storage.start("snapshot", made.uuid, self.service("done")))
            service.delete("snapshot", made.uuid)
        return self.begin("snapshot", made.uuid, identity)

    def test_its_volume_has_one_less_when_it_is_deleted(self) -> None:
        uuid = self.interrupted("deleting", self.dead)
        volume = self.storage.get("snapshot", uuid).volume_uuid
        self.clean()
        self.assertEqual(self.storage.get("volume", volume).snapshots, 0)


class BackupHandlerTests(_BlockStorageCase, unittest.TestCase):
    resource_type = "backup"
    handler_class: type[CleanupHandler] = BackupHandler
    expected: ClassVar = {"creating": "error", "restoring": "available", "deleting": None}

    def interrupted(self, status: str, identity: ServiceIdentity) -> str:
        service, agent = self.storage.service, self.storage.agent("done")
        volume = service.create_volume(SIZE)
        agent.loop.run(self.storage.start("volume", volume.uuid, self.service("done")))
        made = service.create_backup(volume.uuid)
        if status != "creating":
            agent.loop.run(self.storage.start("backup", made.uuid, self.service("done")))
            if status == "deleting":
                service.delete("backup", made.uuid)
            else:
                service.restore(made.uuid, volume.uuid)
        return self.begin("backup", made.uuid, identity)


#: What the agent of an instance's destination does, and of a resize in its place.
_OPERATION = {"migrating": PREPARE, "resizing": "resize"}


class InstanceHandlerTests(CleanupHandlerTests, unittest.TestCase):
    resource_type = "instance"
    handler_class: type[CleanupHandler] = InstanceHandler
    expected: ClassVar = {
        "building": "error",
        "deleting": None,
        **dict.fromkeys(("unshelving", "evacuating", "starting"), "stopped"),
        **dict.fromkeys(("rebuilding", "resizing", "shelving", "migrating", "stopping", "rebooting"), "active"),
    }

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.fleet = Fleet(f"sqlite:///{folder.name}/test.sqlite", folder.name)
        self.database = self.fleet.database
        self.addCleanup(self.database.close)
        self.fleet.create_tables()

    def tools(self, identity: ServiceIdentity) -> Any:
        found: Any = super().tools(identity)
        found.instances, found.release = self.fleet.instances, self.fleet.store.release
        found.tell = self.fleet.events.append
        return found

    def interrupted(self, status: str, identity: ServiceIdentity) -> str:
        uuid = self.fleet.place()
        if status != "building":
            held = self.fleet.workers.take("instance", uuid, self.service("done"))
            assert held is not None
            held.finish_with(lambda tx: self.fleet.instances.set_status(tx, uuid, "active", held.token))
        if status == "deleting":
            self.fleet.deleter.delete(uuid)
        elif status != "building":
            host = self.fleet.instances.get(uuid).host
            with self.database.write() as tx:
                token = self.fleet.workers.create(
                    tx, "instance", uuid, _OPERATION.get(status, status), status, target_host=host
                )
                assert self.fleet.instances.set_status(tx, uuid, status, token)
        assert self.fleet.workers.take("instance", uuid, identity) is not None
        return uuid

    def test_what_its_dead_host_may_run_stays_there(self) -> None:
        for status in ("unshelving", "evacuating"):
            uuid = self.interrupted(status, self.dead)
            before = self.fleet.instances.get(uuid)
            self.clean()
            after = self.fleet.instances.get(uuid)
            place = (before.host, before.node, before.node_uuid)
            self.assertEqual((*place, "unknown"), (after.host, after.node, after.node_uuid, after.actual_state))
            self.assertIn("may run it", after.fault)
            self.assertEqual({}, after.pending)

    def test_what_a_dead_host_had_stopped_for_a_move_or_begun_to_start_stays_there(self) -> None:
        for operation in (TRANSFER, REVERT, ACTIVATE):
            with self.subTest(operation), mock.patch.dict(_OPERATION, migrating=operation):
                uuid = self.interrupted("migrating", self.dead)
                self.clean()
                after = self.fleet.instances.get(uuid)
                self.assertEqual(
                    ("stopped", HOST, "unknown", {}), (after.status, after.host, after.actual_state, after.pending)
                )
                self.assertIn("died while it moved", after.fault)
                self.assert_tidy(uuid)

    def test_observers_are_told_of_what_nobody_else_can_tell_any_more(self) -> None:
        made = {status: self.interrupted(status, self.dead) for status in self.expected}
        with self.database.write() as tx:
            # What moves is where it was, and its destination's agent had to do it.
            of_move = instances.c.uuid == made["migrating"]
            tx.execute(sa.update(instances).where(of_move).values(pending={"host": "host-2"}))
        self.clean()
        told = {each.instance: each for each in self.fleet.events}  # type: ignore[attr-defined]
        self.assertEqual((len(made), len(made)), (len(told), len(self.fleet.events)))
        for status, uuid in made.items():
            with self.subTest(status=status):
                event = told[uuid]
                if status == "deleting":
                    self.assertEqual(InstanceDeleted(uuid, HOST), event)
                    continue
                assert isinstance(event, InstanceFailed)
                host = "host-2" if status == "migrating" else HOST
                operation = "build" if status == "building" else _OPERATION.get(status, status)
                self.assertEqual((host, operation), (event.host, event.operation))
                self.assertIn("died", event.fault)
        self.clean()
        self.assertEqual(len(made), len(self.fleet.events), "and once")

    def status(self, uuid: str) -> str | None:
        with self.database.read() as tx:
            return tx.execute(sa.select(instances.c.status).where(instances.c.uuid == uuid)).scalar()

    def assert_tidy(self, uuid: str) -> None:
        held = bool(self.fleet.store.allocations(consumers=[uuid]))
        assert held == (self.status(uuid) in ("active", "stopped")), (
            "a claim is held by what is there, and by nothing else"
        )


class ClusterHandlerTests(CleanupHandlerTests, unittest.TestCase):
    resource_type = "cluster"
    handler_class: type[CleanupHandler] = ClusterHandler
    expected: ClassVar = {"Starting": "Error", "Deleting": None}

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.database = Database(f"sqlite:///{folder.name}/test.sqlite", lock_timeout=30)
        self.addCleanup(self.database.close)
        with self.database.write() as tx:
            work_tables.workers.metadata.create_all(tx)
            data_tables.clusters.metadata.create_all(tx)
        self.workers = SqlOperationStore(self.database, lease_seconds=60)
        self.store = DataStore(self.database, self.workers)

    def interrupted(self, status: str, identity: ServiceIdentity) -> str:
        uuid = self.store.create_cluster("c", identity.host)
        if status == "Deleting":
            self.store.delete_cluster(uuid)
        assert self.workers.take("cluster", uuid, identity) is not None
        return uuid

    def status(self, uuid: str) -> str | None:
        found = self.store.cluster(uuid)
        return None if found is None else found.status

    def test_jobs_of_a_cluster_that_goes_count_as_killed(self) -> None:
        uuid = self.store.create_cluster("c", "dead", status="Active")
        job = self.store.create_job(uuid, ["sleep", "600"])
        self.store.delete_cluster(uuid)
        assert self.workers.take("cluster", uuid, self.dead) is not None
        self.clean()
        found = self.store.job(job)
        self.assertEqual((self.status(uuid), found and found.status), (None, "Killed"))
