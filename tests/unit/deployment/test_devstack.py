# SPDX-License-Identifier: Apache-2.0
"""DevStack's plugin, phase by phase, with DevStack's own functions replaced by ones that write down how they were called."""

from __future__ import annotations

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from moorage.cli.roles import ROLES
from moorage.control_plane import config, unknown_options
from tests import servers

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "devstack"
#: DevStack's functions and the commands that would change the machine. What is asked for an answer gives one.
STUBS = r"""
set -eu
told() { echo "$*" >> "$CALLS"; }
for name in define_plugin enable_service install_package setup_develop recreate_database run_process stop_process start_service \
        stop_service create_service_user get_or_create_service get_or_create_endpoint configure_keystone_authtoken_middleware; do
    eval "$name() { told $name \"\$@\"; }"
done
sudo() { told sudo "$@"; if [ "$1" = tee ]; then while read -r line; do told "  $line"; done; fi; }
moorage-manage() { told moorage-manage "$@"; [ "$3" != user ] || { read -r line; told "  $line"; }; }
wait_for_service() { told wait_for_service "$@"; }
die() { told die "$@"; exit 1; }
is_service_enabled() { local each; for each; do case " $ENABLED " in *" $each "*) return 0 ;; esac; done; return 1; }
is_ubuntu() { return 0; }
database_connection_url() { echo "mysql+pymysql://root:secret@127.0.0.1/$1?charset=utf8"; }
get_transport_url() { echo "rabbit://stackrabbit:secret@192.0.2.1:5672/"; }
get_python_exec_prefix() { echo /opt/stack/bin; }
ipv6_unquote() { echo "$1" | tr -d '[]'; }
iniset() { told iniset "$2" "$3" "$4"; printf '[%s]\n%s = %s\n' "$2" "$3" "$4" >> "$1"; }
DEST=/opt/stack DATA_DIR=$FOLDER SERVICE_HOST=192.0.2.1 SERVICE_LISTEN_ADDRESS=0.0.0.0 SERVICE_PROTOCOL=http SERVICE_TIMEOUT=60
REGION_NAME=RegionOne STACK_USER=stack ADMIN_PASSWORD=nomoresecret MOORAGE_CONF_DIR=$FOLDER
source "$PLUGIN/override-defaults"
source "$PLUGIN/settings"
source "$PLUGIN/plugin.sh" "$@"
"""
SERVICES = tuple(f"moorage-{role}" for role in ROLES)
STACK = ("pre-install", "install", "post-config", "extra", "test-config")


class DevStackTests(unittest.TestCase):
    def setUp(self) -> None:
        servers.program("bash")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.enabled = (*SERVICES, "moorage-zookeeper", "keystone")

    def run_phase(self, *words: str, **settings: str) -> list[str]:
        """What was called, without what settings always call."""
        calls = self.folder / "calls"
        calls.write_text("")
        environment = {
            "PATH": os.environ["PATH"], "FOLDER": str(self.folder), "CALLS": str(calls), "PLUGIN": str(PLUGIN),
            "ENABLED": " ".join(self.enabled), **settings,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "--norc", "-c", STUBS, "devstack", *words],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        self.assertEqual((0, ""), (done.returncode, done.stderr), words)
        return [call for call in calls.read_text().splitlines() if not call.startswith(("define_", "enable_"))]

    def stack(self, **settings: str) -> list[str]:
        return [call for phase in STACK for call in self.run_phase("stack", phase, **settings)]

    def assert_in_order(self, calls: list[str], *beginnings: str) -> None:
        places = []
        for words in beginnings:
            found = [place for place, call in enumerate(calls) if call.startswith(words)]
            self.assertTrue(found, f"{words} is not in {calls}")
            places.append(found[0])
        self.assertEqual(sorted(places), places, calls)

    def test_stacking_sets_up_zookeeper_the_database_and_then_the_services(self) -> None:
        calls = self.stack()
        self.assert_in_order(
            calls, "install_package zookeeperd", "setup_develop /opt/stack/moorage", "sudo tee /etc/zookeeper/conf/zoo.cfg",
            "iniset coordination", "create_service_user moorage", "recreate_database moorage",
            f"moorage-manage --config-file {self.folder}/moorage.conf db upgrade", "start_service zookeeper",
            "run_process moorage-api", "wait_for_service 60 http://192.0.2.1:8780/healthcheck",
        )  # fmt: skip
        for role in ROLES:
            self.assertIn(
                f"run_process moorage-{role} /opt/stack/bin/moorage {role} --config-file {self.folder}/moorage.conf",
                calls,
            )
        self.assertFalse([call for call in calls if "user set" in call], "Keystone knows the users")

    def test_the_configuration_is_one_that_the_services_read(self) -> None:
        self.run_phase("stack", "post-config")
        path = self.folder / "moorage.conf"
        self.assertEqual(0o600, path.stat().st_mode & 0o777)
        self.assertEqual([], unknown_options.unknown([str(path)]))
        conf = config.load(files=[str(path)])
        self.assertEqual("zookeeper://192.0.2.1:2181", conf.coordination.periodic_coordination_backend)
        self.assertEqual("rabbit://stackrabbit:secret@192.0.2.1:5672/", conf.rpc.transport_url)
        self.assertEqual(("keystone", "0.0.0.0:8780"), (conf.api.auth_strategy, conf.api.bind))
        # Done again, it says the same and not everything twice.
        before = path.read_text()
        self.run_phase("stack", "post-config")
        self.assertEqual(before, path.read_text())

    def test_a_zookeeper_that_is_there_is_used_and_left_alone(self) -> None:
        calls = self.stack(MOORAGE_ZOOKEEPER_HOSTS="zk1:2181,zk2:2181")
        calls += self.run_phase("unstack", MOORAGE_ZOOKEEPER_HOSTS="zk1:2181,zk2:2181")
        calls += self.run_phase("clean", MOORAGE_ZOOKEEPER_HOSTS="zk1:2181,zk2:2181")
        self.assertIn("iniset coordination periodic_coordination_backend zookeeper://zk1:2181,zk2:2181", calls)
        self.assertEqual(
            [], [call for call in calls if "zookeeper" in call and not call.startswith(("iniset", "setup_develop"))]
        )

    def test_without_keystone_there_is_a_user_with_the_password_of_the_administrator(self) -> None:
        self.enabled = (*SERVICES, "moorage-zookeeper")
        calls = self.stack()
        self.assertIn("iniset api auth_strategy http_basic", calls)
        (place,) = (number for number, call in enumerate(calls) if "user set admin --password-file -" in call)
        self.assertEqual("  nomoresecret", calls[place + 1])
        self.assertFalse([call for call in calls if call.startswith("create_service_user")])

    def test_unstacking_ends_what_was_started_and_cleaning_removes_what_was_written(self) -> None:
        ended = self.run_phase("unstack")
        self.assertEqual({f"stop_process {name}" for name in SERVICES} | {"stop_service zookeeper"}, set(ended))
        self.assertEqual(
            [f"sudo rm -rf {self.folder}/moorage {self.folder}", f"sudo rm -rf {self.folder}/zookeeper"],
            self.run_phase("clean"),
        )

    def test_where_no_service_is_enabled_nothing_happens(self) -> None:
        self.enabled = ("keystone",)
        self.assertEqual([], [*self.stack(), *self.run_phase("unstack"), *self.run_phase("clean")])

    def test_shellcheck_finds_nothing(self) -> None:
        files = [str(PLUGIN / name) for name in ("plugin.sh", "settings", "override-defaults")]
        files.append(str(ROOT / ".ci/run"))
        done = subprocess.run(
            [servers.program("shellcheck"), *files], capture_output=True, text=True, timeout=60, check=False
        )
        self.assertEqual((0, ""), (done.returncode, done.stdout + done.stderr))
