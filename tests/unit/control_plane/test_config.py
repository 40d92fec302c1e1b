# SPDX-License-Identifier: Apache-2.0
"""The configuration: what is refused, what a reload cannot change, what nothing reads."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from oslo_config import cfg
from typing_extensions import override

from moorage import errors
from moorage.cli import up, validation
from moorage.cli.up import ControlPlane, LaunchPlan
from moorage.control_plane import config, unknown_options
from moorage.control_plane.extension_points import extension_points
from moorage.control_plane.supervisor import EXIT_CONFIG
from moorage.db import Database
from moorage.options import option_sets
from moorage.scheduling.interface import HostFilter
from tests import memory_store


class ConfigCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def file(self, text: str) -> str:
        path = self.folder / "moorage.conf"
        path.write_text(text)
        return str(path)

    def load(self, text: str = "") -> cfg.ConfigOpts:
        return config.load(files=[self.file(text)], state_dir=str(self.folder))


class StateFolderTests(ConfigCase):
    def test_everything_lies_in_the_folder_whatever_its_name_is(self) -> None:
        for name in ("q?x", "pct%41", "$HOME and $$", "a#b &=c:@[x]", "ü\\'\""):
            with self.subTest(name=name):
                folder = self.folder / name
                folder.mkdir()
                conf = config.load(files=[self.file("")], state_dir=str(folder))
                self.assertEqual(str(folder), conf.control_plane.state_dir)
                self.assertEqual(str(folder / "run" / "messages"), conf.rpc.run_dir)
                database = Database.from_config(conf)
                self.addCleanup(database.close)
                with database.write() as transaction:
                    transaction.exec_driver_sql("CREATE TABLE proof (x INTEGER)")
                self.assertTrue((folder / "moorage.sqlite").exists(), list(self.folder.iterdir()))


class LogTests(ConfigCase):
    def test_a_traceback_with_text_that_utf_8_cannot_hold_is_written_with_escapes(self) -> None:
        """In a process of its own: the log is the whole process's."""
        code = (
            "import logging, sys\n"
            "from moorage.control_plane import config, unknown_options, logs\n"
            "logs.setup(config.load(files=sys.argv[1:]), 'moorage-test')\n"
            "try:\n    raise ValueError('\\ud800')\nexcept ValueError:\n    logging.exception('It raised.')\n"
        )
        log = self.folder / "moorage.log"
        path = self.file(f"[DEFAULT]\nlog_file = {log}\n")
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=True
        )
        self.assertEqual("", done.stderr)
        self.assertRegex(log.read_text(), r"(?s)It raised\..*ValueError: \\ud800\n")

    def test_lines_by_a_file_of_pythons_logging_have_each_its_own_milliseconds(self) -> None:
        """The sample files of OpenStack have a formatter of oslo.log's class without a format for dates."""
        log, logging_conf = self.folder / "moorage.log", self.folder / "logging.conf"
        logging_conf.write_text(
            "[loggers]\nkeys = root\n[handlers]\nkeys = file\n[formatters]\nkeys = context\n"
            "[logger_root]\nlevel = INFO\nhandlers = file\n"
            f"[handler_file]\nclass = FileHandler\nargs = ({str(log)!r},)\nformatter = context\n"
            "[formatter_context]\nclass = oslo_log.formatters.ContextFormatter\n"
        )
        code = (
            "import logging as standard, sys\n"
            "from oslo_log import log as logging\n"
            "from moorage.control_plane import config, logs\n"
            "logs.setup(config.load(files=sys.argv[1:]), 'moorage-test')\n"
            "make = standard.getLogRecordFactory()\n"
            "def at(moment):\n"
            "    def record(*args, **kwargs):\n"
            "        made = make(*args, **kwargs)\n"
            "        made.created, made.msecs = moment, moment % 1 * 1000\n"
            "        return made\n"
            "    return record\n"
            "for moment in (1000.25, 1000.75):\n"
            "    standard.setLogRecordFactory(at(moment))\n"
            "    logging.getLogger('here').info('said')\n"
        )
        path = self.file(f"[DEFAULT]\nlog_config_append = {logging_conf}\n")
        subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=True)
        lines = [line for line in log.read_text().splitlines() if line.endswith("said")]
        self.assertRegex("\n".join(lines), r",250\.250 .*\n.*,750\.750 ")


class CommandTests(ConfigCase):
    def run_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).parent / words[0]
        return subprocess.run(
            [str(program), *words[1:]],
            cwd=self.folder,
            input="",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def test_what_looks_for_unknown_names_says_nothing_of_libraries(self) -> None:
        path = self.file("[services]\nreport_interval = 5\n")
        done = self.run_command("moorage", "config", "validate", "--strict", "--config-file", path)
        self.assertEqual((0, ""), (done.returncode, done.stderr), done.stdout)
        checked = self.run_command(
            "moorage-status", "--config-file", path, "--state-dir", str(self.folder), "upgrade", "check"
        )
        self.assertEqual("", checked.stderr)

    def test_a_password_that_nobody_can_be_asked_for_is_told_in_words(self) -> None:
        done = self.run_command("moorage-manage", "--state-dir", str(self.folder), "user", "set", "joe")
        self.assertEqual(1, done.returncode)
        self.assertRegex(done.stderr, r"^moorage: There is no terminal .* --password-file .*\n$")


class Exits(HostFilter):
    """Ends the process, if it can."""

    api_version = (1, 0)

    @override
    def __init__(self, conf: Any = None) -> None:
        sys.exit(4)

    @override
    def host_passes(self, host_state: Any, spec_obj: Any) -> bool:
        return True


class Refuses(Exits):
    """Cannot be used as it is configured."""

    @override
    def __init__(self, conf: Any = None) -> None:
        raise errors.ConfigError("[refuses] settings has 'much'; write NAME=RATIO.")


def exits() -> Any:
    """Instead of classes of filters."""
    raise SystemExit(5)


class ExitingTests(ConfigCase):
    def test_a_plugin_that_exits_is_a_problem_of_the_configuration_like_any_other(self) -> None:
        for what, said in (("Exits", "SystemExit(4)"), ("exits", "SystemExit(5)")):
            conf = self.load(f"[scheduling]\nenabled_filters = {__name__}.{what}\n")
            (problem,) = validation.problems(conf)
            self.assertIn(f"{__name__}.{what}", problem)
            self.assertIn(said, problem)

    def test_the_supervisor_outlives_what_a_new_configuration_does_and_keeps_the_old_one(self) -> None:
        plane = ControlPlane(LaunchPlan(self.folder, config_files=[self.file("")]))
        for text in (f"[scheduling]\nenabled_filters = {__name__}.Exits\n", ""):
            self.file(text)
            with contextlib.redirect_stderr(io.StringIO()) as told:
                # The second time it is a check that exits, and not a plugin by itself.
                checks = [*validation.checks(), ("all of it", lambda conf: sys.exit(6))][:: 1 if text else -1]
                with mock.patch.object(validation, "checks", return_value=checks):
                    self.assertFalse(plane._may_reload())
            self.assertIn("the new configuration is not taken, the old one stays", told.getvalue())
            self.assertIn("SystemExit(4)" if text else "SystemExit(6)", told.getvalue())

    def test_one_agent_enrols_the_machine_where_its_driver_sees_it(self) -> None:
        for text, agents, wanted in (
            ("", None, False),
            ("[compute]\ndriver = process\n", None, True),
            ("[compute]\ndriver = process\n", 1, True),
            ("[compute]\ndriver = process\n", 2, False),
            ("[compute]\ndriver = process\n[agent]\nenrol = false\n", None, False),
            ("[compute]\ndriver = process\n[agent]\nservices = block_storage\n", None, False),
            ("[agent]\nenrol = true\n", None, True),
        ):
            with self.subTest(text=text, agents=agents), contextlib.redirect_stderr(io.StringIO()) as said:
                plan = LaunchPlan(self.folder, agents=agents, config_files=[self.file(text)])
                self.assertEqual(wanted, up.enrols(plan))
                self.assertEqual(agents == 2, "2 agents share this machine" in said.getvalue())
        both = LaunchPlan(self.folder, agents=2, config_files=[self.file("[agent]\nenrol = true\n")])
        with self.assertRaisesRegex(errors.ConfigError, "each agent would enrol all of this machine"):
            up.enrols(both)
        self.assertTrue(up.enrols(LaunchPlan(self.folder, config_files=[self.file("")], driver="process")))

    def test_what_time_can_mend_is_no_configuration_error(self) -> None:
        def late(conf: Any) -> None:
            raise errors.PluginTimeout("the import of a plugin was late")

        def wrong(conf: Any) -> None:
            raise errors.ConfigError("an option is nonsense")

        for checks, expected in (([late], errors.Unavailable), ([late, wrong], errors.ConfigError)):
            with (
                mock.patch.object(validation, "checks", return_value=[("it", each) for each in checks]),
                self.assertRaises(expected) as raised,
            ):
                validation.check(self.load())
            self.assertIn("was late", raised.exception.message)


class ReloadTests(ConfigCase):
    def test_what_only_a_restart_changes_is_named_and_nothing_else(self) -> None:
        new = self.load(
            "[scheduling]\nenabled_filters = compute\nmax_attempts = 3\nrefresh_interval = 5\n"
            "[services]\nreport_interval = 50\n"
        )
        self.assertEqual(
            ["[scheduling] refresh_interval", "[services] report_interval"], config.need_restart(self.load(), new)
        )
        self.assertEqual([], config.need_restart(new, new))

    def test_what_an_options_help_says_of_a_reload_is_what_a_reload_does(self) -> None:
        for group, found in option_sets():
            for option in found:
                if option.mutable:
                    self.assertNotIn("restart", (option.help or "").lower(), (group, option.name))
                else:
                    self.assertNotIn("reload takes", (option.help or "").lower(), (group, option.name))


class FileTests(ConfigCase):
    def refused(self, path: Path) -> str:
        with self.assertRaises(errors.ConfigError) as raised:
            config.load(files=[str(path)], state_dir=str(self.folder))
        self.assertIn(str(path), raised.exception.message)
        return raised.exception.message

    def test_what_is_no_text_in_utf_8_is_refused_with_file_line_and_remedy(self) -> None:
        path = self.folder / "moorage.conf"
        for data, parts in (
            ("[api]\n# é\n".encode("latin-1"), ("line 2", "0xe9", "iconv")),
            ("[api]\n".encode("utf-8-sig"), ("BOM", "UTF-8 without")),
            ("[api]\n".encode("utf-16"), ("BOM", "UTF-8 without")),
            (b"[api]\nbind = a\0b\n", ("line 2", "NUL")),
        ):
            path.write_bytes(data)
            for part in parts:
                self.assertIn(part, self.refused(path))

    def test_what_is_no_regular_file_is_refused_and_not_waited_for(self) -> None:
        pipe, folder, loop = self.folder / "pipe", self.folder / "folder.conf", self.folder / "loop"
        os.mkfifo(pipe)
        folder.mkdir()
        loop.symlink_to(loop)
        self.assertIn("is a pipe", self.refused(pipe))
        self.assertIn("is a folder", self.refused(folder))
        self.assertIn("cannot be read", self.refused(loop))
        self.assertIn("cannot be read", self.refused(self.folder / "absent.conf"))
        config.load(files=[os.devnull], state_dir=str(self.folder))

    def test_every_wrong_value_is_told_with_its_file_and_option(self) -> None:
        path = self.file(
            "[api]\nthreads = many\nbind = $nosuch\n[scheduling]\nplugin_deadline = nan\nbreaker_window = inf\n"
            "[weigher_metrics]\nsettings = a,b\n[periodic]\nworkers = 0\n"
        )
        found = self.refused(Path(path))
        for name in (
            *("[api] threads", "[api] bind", "[scheduling] plugin_deadline", "[scheduling] breaker_window"),
            *("[weigher_metrics] settings", "[periodic] workers"),
        ):
            self.assertEqual(1, found.count(f"{path}: {name}: "), (name, found))
        self.assertNotIn("LocationInfo", found)
        self.assertIn("$$", found)

    def test_a_wrong_value_under_an_old_name_is_told_where_it_stands(self) -> None:
        path = self.file("[DEFAULT]\nperiodic_workers_number = none\n")
        self.assertIn(f"{path}: [DEFAULT] periodic_workers_number: ", self.refused(Path(path)))

    def test_a_wrong_value_of_the_command_line_is_told_as_such(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, r"\[api\] threads = many, of the command line"):
            config.load(files=[os.devnull], state_dir=str(self.folder), overrides={("api", "threads"): "many"})

    def test_an_option_that_is_set_twice_is_told_unless_it_is_meant_to_be(self) -> None:
        file = self.file("[api]\nthreads = 2\nthreads = 3\n[DEFAULT]\nlog_file = a\n[scheduling]\nmax_attempts = 1\n")
        self.assertEqual(
            [f"{file}: [api] threads is set 2 times; only the last one counts. Write it once."],
            unknown_options.repeated([file]),
        )
        many = cfg.MultiStrOpt("threads")
        with mock.patch.object(unknown_options, "option_sets", lambda: iter([("api", [many])])):
            self.assertEqual([], unknown_options.repeated([file]))


class UnknownTests(ConfigCase):
    def test_a_misspelt_name_is_told_with_the_one_that_was_meant(self) -> None:
        found = unknown_options.unknown(
            [self.file("[scheduling]\nenabeld_filters = compute\n[sheduling]\nmax_attempts = 1\n")]
        )
        self.assertEqual(2, len(found))
        self.assertIn("[scheduling] enabeld_filters; enabled_filters was meant?", found[0])
        self.assertIn("the section [sheduling]; scheduling was meant?", found[1])

    def test_options_of_libraries_are_known(self) -> None:
        text = "[DEFAULT]\ndebug = true\nlog-file = x\n[keystone_authtoken]\nwww_authenticate_uri = http://x\n"
        self.assertEqual([], unknown_options.unknown([self.file(text)]))

    def test_a_file_that_is_no_configuration_is_refused_in_words(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "moorage.conf"):
            unknown_options.unknown([self.file("no section\n")])
        with self.assertRaisesRegex(errors.ConfigError, "nowhere.conf"):
            unknown_options.unknown([str(self.folder / "nowhere.conf")])


class DeprecatedTests(ConfigCase):
    def test_old_names_are_known_where_they_stood_and_told_with_the_new_ones(self) -> None:
        file = self.file("[DEFAULT]\nperiodic_workers_number = 2\n[periodic]\nspacing = reconcile:60\n")
        self.assertEqual([], unknown_options.unknown([file]))
        self.assertEqual(
            [f"{file}: [DEFAULT] periodic_workers_number is deprecated; write [periodic] workers."],
            unknown_options.deprecated([file]),
        )
        # Where the new name belongs the old one never was one.
        wrong = self.file("[periodic]\nperiodic_workers_number = 2\n")
        self.assertEqual((1, []), (len(unknown_options.unknown([wrong])), unknown_options.deprecated([wrong])))

    def test_what_is_going_to_be_removed_is_told_with_the_reason(self) -> None:
        gone = cfg.BoolOpt("shiny", deprecated_for_removal=True, deprecated_reason="nothing shines any more")
        renamed = cfg.StrOpt("colour", deprecated_name="color", deprecated_group="old_paint")
        sets = [*option_sets(), ("paint", [gone, renamed])]
        file = self.file("[paint]\nshiny = true\n[old_paint]\ncolor = red\n")
        with mock.patch.object(unknown_options, "option_sets", lambda: iter(sets)):
            self.assertEqual([], unknown_options.unknown([file]))
            self.assertEqual(
                [
                    f"{file}: [paint] shiny is deprecated; nothing shines any more.",
                    f"{file}: [old_paint] color is deprecated; write [paint] colour.",
                ],
                unknown_options.deprecated([file]),
            )


class ValidationTests(ConfigCase):
    def test_the_defaults_can_be_used(self) -> None:
        self.assertEqual([], validation.problems(self.load()))

    def test_everything_that_is_wrong_is_told_at_once(self) -> None:
        conf = self.load(
            "[scheduling]\nenabled_filters = nosuch\n[allocation]\nstore = absent\norphan_detectors = blind\n[rpc]\ntransport_url = pigeon://\n"
            "[database]\nconnection = bogus://\n[agent]\nservices = missing\n[sharding]\nstrategy = unknown\n"
            "[cleanup]\nenabled_handlers = nobody\n[periodic]\nenabled_tasks = never\n"
            "[coordination]\nperiodic_coordination_backend = nowhere\n"
            "[api]\nauth_strategy = noauth\nbind = 0.0.0.0:1\n"
        )
        found = validation.problems(conf)
        for part in (
            *("'nosuch'", "'absent'", "'pigeon'", "bogus", "'missing'", "noauth"),
            *("'unknown'", "'nobody'", "'never'", "'nowhere'", "'blind'"),
        ):
            self.assertEqual(1, sum(part in text for text in found), (part, found))
        with self.assertRaises(errors.ConfigError) as raised:
            validation.check(conf)
        self.assertEqual(" ".join(found), raised.exception.message)

    def test_whatever_chooses_plugins_is_looked_at(self) -> None:
        names: dict[str, str] = {}
        text = ""
        # Fencing drivers are chosen by the driver of the node.
        chosen = [point for point in extension_points() if point.group != "moorage.fencing_drivers"]
        for number, point in enumerate(chosen):
            section, _, option = point.option.partition(" ")
            names[f"nosuch{number}x"] = point.option
            # One is chosen by the scheme of a URL.
            text += f"{section}\n{option} = nosuch{number}x{':' if option.endswith('_url') else ''}\n"
        found = validation.problems(self.load(text))
        for name, option in names.items():
            self.assertEqual(1, sum(name in problem for problem in found), (option, found))

    def test_an_option_for_a_periodic_task_that_there_is_not_is_told_with_what_may_be_meant(self) -> None:
        (found,) = validation.problems(self.load("[periodic]\nspacing = reconcile:60,update_job_status:45\n"))
        self.assertIn("[periodic] spacing names update_job_status", found)
        self.assertIn("update_job_statuses was meant?", found)

    def test_a_pause_or_a_limit_of_what_nothing_cleans_is_told_with_what_may_be_meant(self) -> None:
        for option in ("paused = volumes", "limits = volumes:2"):
            (found,) = validation.problems(self.load(f"[cleanup]\n{option}\n"))
            self.assertIn(
                f"[cleanup] {option.partition(' ')[0]} names volumes, which no installed handler cleans", found
            )
            self.assertIn("volume was meant?", found)
        (found,) = validation.problems(self.load("[cleanup]\nlimits = volume:none\n"))
        self.assertIn("[cleanup] limits gives volume:none", found)
        self.assertEqual([], validation.problems(self.load("[cleanup]\npaused = *\nlimits = volume:2,cluster:1\n")))

    def test_heartbeats_that_are_too_rare_are_refused_before_a_start(self) -> None:
        (found,) = validation.problems(self.load("[services]\nreport_interval = 30\n"))
        self.assertIn("service_down_time = 60 is less than three times report_interval = 30", found)

    def test_a_member_of_so_many_points_that_engines_would_only_compute_rings_is_refused(self) -> None:
        (found,) = validation.problems(self.load("[coordination]\nweight = 1000\nhash_ring_replicas_count = 1000\n"))
        self.assertIn("1000000 points on the ring", found)
        self.assertEqual([], validation.problems(self.load("[coordination]\nweight = 1000\n")))

    def test_a_plugin_that_refuses_an_option_says_so_in_its_own_words(self) -> None:
        conf = self.load(f"[scheduling]\nenabled_filters = {__name__}.Refuses\n")
        self.assertEqual(["[refuses] settings has 'much'; write NAME=RATIO."], validation.problems(conf))

    def test_a_value_that_an_option_refuses_is_told_with_its_place(self) -> None:
        with self.assertRaisesRegex(
            errors.ConfigError, r"moorage.conf: \[weigher_metrics\] settings: 'much' is no setting"
        ):
            self.load("[weigher_metrics]\nsettings = much\n")

    def test_messages_that_do_not_leave_a_process_are_refused(self) -> None:
        (found,) = validation.problems(self.load("[rpc]\ntransport_url = memory://\n"))
        self.assertIn("'memory', which is not cross-process", found)

    def test_a_policy_file_must_be_there_and_hold_policies(self) -> None:
        policy = self.folder / "policy.yaml"
        for text in (
            None,
            "a: [",
            "scheduling:instances:get: 'rule:nobody_wrote_this'\n",
            "scheduling:instances:got: 'role:reader'\n",
            "scheduling:instances:get: 'role:reader adn role:member'\n",
        ):
            if text is not None:
                policy.write_text(text)
            found = validation.problems(self.load(f"[api]\npolicy_file = {policy}\n"))
            with self.subTest(text=text):
                self.assertEqual(1, len(found))
                self.assertIn(str(policy), found[0])
        policy.write_text("scheduling:instances:get: '!'\nscheduling:instances:delete: 'role:reader'\n")
        self.assertEqual([], validation.problems(self.load(f"[api]\npolicy_file = {policy}\n")))

    def test_what_a_start_refuses_of_the_api_is_refused_before(self) -> None:
        for bind in ("nonsense", "127.0.0.1:99999", "%(x)s", "a b:80", "127.0.0.1:-1", "127.0.0.1:²"):
            with self.subTest(bind=bind):
                (found,) = validation.problems(self.load(f"[api]\nbind = {bind}\n"))
                self.assertIn("[api] bind", found)
        for bind in ("127.0.0.1:0", "[::1]:1", "::1:80", "api.example.org:80", ":80"):
            self.assertEqual([], validation.problems(self.load(f"[api]\nbind = {bind}\n")), bind)

    def test_a_file_of_users_must_be_one_where_it_is_named(self) -> None:
        for path in (self.folder / "absent", self.folder):
            (found,) = validation.problems(self.load(f"[api]\nhttp_basic_auth_user_file = {path}\n"))
            self.assertIn(str(path), found)

    def test_keystone_needs_its_section_and_its_library(self) -> None:
        asked = "[api]\nauth_strategy = keystone\n"
        (found,) = validation.problems(self.load(asked))
        self.assertIn("needs a section [keystone_authtoken]", found)
        (found,) = validation.problems(self.load(f"{asked}[keystone_authtoken]\nauth_type = nosuch\n"))
        self.assertIn("[keystone_authtoken] cannot be used", found)
        how = "auth_type = password\nauth_url = http://127.0.0.1:1\nusername = u\npassword = p\nproject_name = p\n"
        self.assertEqual([], validation.problems(self.load(f"{asked}[keystone_authtoken]\n{how}")))
        with mock.patch.dict(sys.modules, {"keystonemiddleware.auth_token": None}):
            (found,) = validation.problems(self.load(asked))
        self.assertIn("moorage[keystone]", found)

    def test_a_service_that_would_be_dead_between_two_heartbeats_is_refused(self) -> None:
        (found,) = validation.problems(self.load("[services]\nreport_interval = 60\nservice_down_time = 30\n"))
        self.assertIn("service_down_time = 30 is less than three times report_interval = 60", found)

    def test_a_backend_of_coordination_that_could_not_be_opened_is_refused(self) -> None:
        asked = "[coordination]\nperiodic_coordination_backend = "
        for url, said in (
            ("zookeepr://h", "zookeepr"),
            ("memory", "'memory'"),
            ("tooz+etcd3+http://h:1", "tooz+etcd3"),
        ):
            (found,) = validation.problems(self.load(f"{asked}{url}\n"))
            self.assertIn(said, found)
        with mock.patch.dict(sys.modules, {"etcd3gw": None, "tooz.drivers.etcd3gw": None}):
            (found,) = validation.problems(self.load(f"{asked}etcd3+http://h:2379\n"))
        self.assertIn("etcd3+http://h:2379", found)
        self.assertEqual([], validation.problems(self.load(f"{asked}database\n")))

    def test_messages_need_a_broker_with_a_name(self) -> None:
        for url in ("rabbit://:@@@/", "rabbit://u:p@:5672/v", "rabbit://u:secret@h:99999/"):
            (found,) = validation.problems(self.load(f"[rpc]\ntransport_url = {url}\n"))
            self.assertIn("[rpc] transport_url", found)
            self.assertNotIn("secret", found)
        self.assertEqual([], validation.problems(self.load("[rpc]\ntransport_url = rabbit://u:p@h,u:p@g:5671/v\n")))

    def test_a_database_needs_its_driver_and_a_port_that_is_one(self) -> None:
        with mock.patch.dict(sys.modules, {"pymysql": None}):
            (found,) = validation.problems(self.load("[database]\nconnection = mysql+pymysql://a:secret@h/d\n"))
        self.assertIn("moorage[mysql]", found)
        (found,) = validation.problems(self.load("[database]\nconnection = postgresql://a:secret@h:abc/d\n"))
        self.assertIn("[database] connection", found)
        self.assertNotIn("secret", found)

    def test_a_store_that_processes_cannot_share_is_refused(self) -> None:
        memory_store.offer(self)
        (found,) = validation.problems(self.load("[allocation]\nstore = memory\n"))
        self.assertIn("[allocation] store = memory", found)

    def test_a_log_that_could_not_be_opened_is_refused(self) -> None:
        for name in ("log_config_append", "log_dir", "log_file"):
            (found,) = validation.problems(self.load(f"[DEFAULT]\n{name} = {self.folder}/absent/x\n"))
            self.assertIn(f"[DEFAULT] {name}", found)
        self.assertEqual([], validation.problems(self.load(f"[DEFAULT]\nlog_dir = {self.folder}\nlog_file = x\n")))

    def test_no_filter_at_all_is_told_and_not_refused(self) -> None:
        conf = self.load("[scheduling]\nenabled_filters =\n")
        self.assertEqual([], validation.problems(conf))
        self.assertIn("enabled_filters is empty", validation.doubtful(conf)[0])
        self.assertEqual([], validation.doubtful(self.load()))

    def test_looking_writes_nothing(self) -> None:
        conf = self.load("[coordination]\nperiodic_coordination_backend = database\n")
        before = sorted(self.folder.rglob("*"))
        validation.problems(conf)
        self.assertEqual(before, sorted(self.folder.rglob("*")))


class StartTests(ConfigCase):
    """A start refuses the same in words; before there is anything of it in the database."""

    def test_a_role_says_what_is_wrong(self) -> None:
        for text, said in (
            ("[services]\nreport_interval = 60\nservice_down_time = 30\n", "service_down_time = 30"),
            (f"[DEFAULT]\nlog_config_append = {self.folder}/absent\n", "log_config_append"),
            (f"[DEFAULT]\nlog_dir = {self.folder}/absent\n", "log_dir"),
        ):
            with self.subTest(said=said):
                ended = subprocess.run(
                    [sys.executable, "-m", "moorage.cli.roles", "engine", "--state-dir", str(self.folder)]
                    + ["--config-file", self.file(text)],
                    capture_output=True, text=True, timeout=120, check=False,
                )  # fmt: skip
                self.assertEqual(EXIT_CONFIG, ended.returncode, ended.stderr)
                self.assertIn(said, ended.stderr)
                self.assertNotIn("Traceback", ended.stderr)
                self.assertFalse((self.folder / "moorage.sqlite").exists())
