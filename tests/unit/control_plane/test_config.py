# SPDX-License-Identifier: Apache-2.0
"""The configuration: what is refused, what a reload cannot change, what nothing reads."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from oslo_config import cfg
from typing_extensions import override

from moorage import errors, options
from moorage.cli import validation
from moorage.cli.up import ControlPlane, Plan
from moorage.control_plane import config
from moorage.control_plane.extension_points import EXTENSION_POINTS
from moorage.db import Database
from moorage.options import option_sets
from moorage.scheduling.interface import HostFilter


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
        self.assertRegex(done.stderr, r"^moorage: Nobody can be asked .* --password-file .*\n$")


class Exits(HostFilter):
    """Ends the process, if it can."""

    api_version = (1, 0)

    @override
    def __init__(self, conf: Any = None) -> None:
        sys.exit(4)

    @override
    def host_passes(self, host_state: Any, spec_obj: Any) -> bool:
        return True


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
        plane = ControlPlane(Plan(self.folder, config_files=[self.file("")]))
        for text in (f"[scheduling]\nenabled_filters = {__name__}.Exits\n", ""):
            self.file(text)
            with contextlib.redirect_stderr(io.StringIO()) as told:
                # The second time it is a check that exits, and not a plugin by itself.
                checks = [*validation.CHECKS, ("all of it", lambda conf: sys.exit(6))][:: 1 if text else -1]
                with mock.patch.object(validation, "CHECKS", checks):
                    self.assertFalse(plane._may_reload())
            self.assertIn("the new configuration is not taken, the old one stays", told.getvalue())
            self.assertIn("SystemExit(4)" if text else "SystemExit(6)", told.getvalue())

    def test_options_that_cannot_be_listed_are_told_and_left_out(self) -> None:
        point = mock.Mock(value="acme.options:list_opts", dist=mock.Mock())
        point.load.return_value = exits
        with (
            mock.patch.object(options, "groups", return_value={"moorage.filters"}),
            mock.patch.object(options, "entry_points", return_value=[point]),
            self.assertLogs("moorage.options", "WARNING") as logs,
        ):
            self.assertEqual([], list(option_sets()))
        self.assertIn("SystemExit(5)", logs.output[0])


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


class UnknownTests(ConfigCase):
    def test_a_misspelt_name_is_told_with_the_one_that_was_meant(self) -> None:
        found = config.unknown([self.file("[scheduling]\nenabeld_filters = compute\n[sheduling]\nmax_attempts = 1\n")])
        self.assertEqual(2, len(found))
        self.assertIn("[scheduling] enabeld_filters; enabled_filters was meant?", found[0])
        self.assertIn("the section [sheduling]; scheduling was meant?", found[1])

    def test_options_of_libraries_are_known(self) -> None:
        text = "[DEFAULT]\ndebug = true\nlog-file = x\n[keystone_authtoken]\nwww_authenticate_uri = http://x\n"
        self.assertEqual([], config.unknown([self.file(text)]))

    def test_a_file_that_is_no_configuration_is_refused_in_words(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "moorage.conf"):
            config.unknown([self.file("no section\n")])
        with self.assertRaisesRegex(errors.ConfigError, "nowhere.conf"):
            config.unknown([str(self.folder / "nowhere.conf")])


class DeprecatedTests(ConfigCase):
    def test_old_names_are_known_where_they_stood_and_told_with_the_new_ones(self) -> None:
        file = self.file("[DEFAULT]\nperiodic_workers_number = 2\n[periodic]\nspacing = reconcile:60\n")
        self.assertEqual([], config.unknown([file]))
        self.assertEqual(
            [f"{file}: [DEFAULT] periodic_workers_number is deprecated; write [periodic] workers."],
            config.deprecated([file]),
        )
        # Where the new name belongs the old one never was one.
        wrong = self.file("[periodic]\nperiodic_workers_number = 2\n")
        self.assertEqual((1, []), (len(config.unknown([wrong])), config.deprecated([wrong])))

    def test_what_is_going_to_be_removed_is_told_with_the_reason(self) -> None:
        gone = cfg.BoolOpt("shiny", deprecated_for_removal=True, deprecated_reason="nothing shines any more")
        renamed = cfg.StrOpt("colour", deprecated_name="color", deprecated_group="old_paint")
        sets = [*option_sets(), ("paint", [gone, renamed])]
        file = self.file("[paint]\nshiny = true\n[old_paint]\ncolor = red\n")
        with mock.patch.object(config, "option_sets", lambda: iter(sets)):
            self.assertEqual([], config.unknown([file]))
            self.assertEqual(
                [
                    f"{file}: [paint] shiny is deprecated; nothing shines any more.",
                    f"{file}: [old_paint] color is deprecated; write [paint] colour.",
                ],
                config.deprecated([file]),
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
        for number, point in enumerate(EXTENSION_POINTS):
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
        conf = self.load("[scheduling]\nenabled_weighers = metrics\n[weigher_metrics]\nsettings = much\n")
        self.assertEqual(
            ["[weigher_metrics] settings has 'much'; write NAME=RATIO, for example cpu.percent=-1.0."],
            validation.problems(conf),
        )

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
