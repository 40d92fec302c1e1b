# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with a plugin: the message names the plugin, its distribution and what to do, at every extension point."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pathlib
import random
import sys
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from moorage import errors, extensions, importing
from moorage.cleanup.cleaner import Cleaner
from moorage.cli.commands.plugin import PluginCheck
from moorage.control_plane.extension_points import extension_points
from moorage.coordination.runner import Settings, TaskRunner
from moorage.coordination.task_run import OwnsAll
from moorage.extensions import ExtensionPoint, PluginState, origin_of
from moorage.sharding.interface import STRATEGIES, ShardNode
from moorage.sharding.planner import make_plan
from moorage.testing.clock import ManualClock

#: Implements everything that an interface asks for; ``{more}`` is what the case adds.
COMPLETE = """
from {module} import {interface} as Interface
Complete = type("Complete", (Interface,), {{
    "api_version": {version},
    "__init__": lambda self, *arguments, **options: None,
    **{{name: (lambda self, *arguments, **options: None) for name in Interface.__abstractmethods__ if name != "__init__"}},
    {more}
}})
"""

EXIT = '__import__("sys").exit(4)'


class FailureCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.site = pathlib.Path(folder.name)
        sys.path.insert(0, folder.name)
        self.addCleanup(sys.path.remove, folder.name)
        self.addCleanup(importlib.invalidate_caches)
        self.number = 0
        # Nothing else is looked at.
        self.all_entry_points = extensions.entry_points
        only = mock.patch.object(extensions, "entry_points", self.entry_points)
        only.start()
        self.addCleanup(only.stop)

    def entry_points(self, group: str) -> Sequence[importlib.metadata.EntryPoint]:
        """Of the distributions of the test; the parts declare the extension points that are looked at."""
        if group == "moorage.parts":
            return self.all_entry_points(group)
        found = importlib.metadata.distributions(path=[str(self.site)])
        return [point for each in found for point in each.entry_points.select(group=group)]

    def install(self, point: ExtensionPoint[Any], code: str, *, extra: str = "", owners: int = 1) -> None:
        """Distributions that bring ``gadget``, as pip would leave them."""
        for owner in ("acme", "zeta")[:owners]:
            self.number += 1
            module = f"{owner}_failing_{self.number}"
            (self.site / f"{module}.py").write_text(code)
            self.addCleanup(sys.modules.pop, module, None)
            info = self.site / f"{owner}-1.5.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: 1.5\n")
            (info / "entry_points.txt").write_text(f"[{point.group}]\ngadget = {module}:Complete {extra}\n")
        importlib.invalidate_caches()

    def complete(self, point: ExtensionPoint[Any], *, version: object = None, more: str = "") -> str:
        assert point.interface is not None
        return COMPLETE.format(
            module=point.interface.__module__,
            interface=point.interface.__qualname__,
            version=version or point.api_version,
            more=more,
        )

    def points(self) -> Iterator[ExtensionPoint[Any]]:
        for point in extension_points():
            with self.subTest(group=point.group):
                yield point

    def refused(self, point: ExtensionPoint[Any], state: PluginState, *parts: str) -> None:
        with self.assertRaises((errors.PluginLoadError, errors.PluginTimeout)) as caught:
            point.load("gadget")
        self.said(caught.exception.message, point, *parts)
        self.assertEqual(state.value, caught.exception.details["state"])
        (finding,) = point.survey(["gadget"])
        self.assertIs(state, finding.state)

    def said(self, message: str, point: ExtensionPoint[Any], *parts: str) -> None:
        for part in ("'gadget'", "acme", "1.5", point.group, *parts):
            self.assertIn(part, message)
        self.assertNotIn("Traceback", message)


class LoadingTests(FailureCase):
    def test_a_complete_one_loads_so_that_the_others_fail_for_what_they_say(self) -> None:
        for point in self.points():
            self.install(point, self.complete(point))
            self.assertEqual(("acme", "1.5"), (point.load("gadget").distribution, point.load("gadget").version))

    def test_an_import_that_fails(self) -> None:
        for point in self.points():
            self.install(point, "import no_such_library\n")
            remedy = f"Repair or uninstall acme, or take the plugin out of {point.option}."
            self.refused(point, PluginState.BROKEN, "No module named 'no_such_library'", remedy)

    def test_an_extra_that_is_not_installed(self) -> None:
        for point in self.points():
            self.install(point, "import no_such_library\n", extra="[gpu]")
            self.refused(point, PluginState.BROKEN, "no_such_library", "Try: pip install 'acme[gpu]'.")

    def test_a_module_that_exits_or_asserts(self) -> None:
        for point in self.points():
            for code in ("raise SystemExit(3)\n", "assert False, 'no good'\n"):
                self.install(point, code)
                self.refused(point, PluginState.BROKEN, "cannot be imported", "Repair or uninstall acme")

    def test_a_module_that_hangs(self) -> None:
        for point in self.points():
            self.install(point, "import threading\nthreading.Event().wait(20)\n")
            with mock.patch.object(importing, "PROCESSOR_LIMIT", 0.005):
                self.refused(
                    point, PluginState.LATE, "within 0.005 seconds of processor time", "repair or uninstall acme"
                )

    def test_a_class_of_another_type(self) -> None:
        for point in self.points():
            assert point.interface is not None
            self.install(point, "class Complete:\n    api_version = (1, 0)\n")
            parts = (f"not a subclass of {point.interface.__module__}", "mistake in acme", "derive the class")
            self.refused(point, PluginState.WRONG_TYPE, *parts)

    def test_a_class_that_lacks_methods(self) -> None:
        for point in self.points():
            interface = point.interface
            assert interface is not None
            import_it = f"from {interface.__module__} import {interface.__qualname__} as Interface\n"
            self.install(point, f"{import_it}class Complete(Interface):\n    api_version = (1, 0)\n")
            lacks = f"lacks the methods {', '.join(sorted(interface.__abstractmethods__))}"
            self.refused(point, PluginState.WRONG_TYPE, lacks, "mistake in acme", "implement them")

    def test_another_version_of_the_interface(self) -> None:
        for point in self.points():
            major, minor = point.api_version
            for version in ((major + 1, 0), (major, minor + 1)):
                self.install(point, self.complete(point, version=version))
                written = f"api_version {version[0]}.{version[1]}, this Moorage offers {major}.{minor}"
                self.refused(point, PluginState.WRONG_API, written, f"Install a release of acme for {major}.x")

    def test_two_owners_of_the_name(self) -> None:
        for point in self.points():
            self.install(point, self.complete(point), owners=2)
            self.refused(point, PluginState.DUPLICATE, "zeta 1.5", "Uninstall one of them")
            (self.site / "zeta-1.5.dist-info" / "entry_points.txt").unlink()

    def test_a_constructor_that_raises(self) -> None:
        raising = '"__init__": lambda self, *arguments, **options: {}["of no use"],'
        for point in self.points():
            self.install(point, self.complete(point, more=raising))
            with self.assertRaises(errors.PluginLoadError) as caught:
                point.load("gadget").build()
            self.said(caught.exception.message, point, "KeyError: 'of no use'", "take it out of the configuration")

    def test_a_constructor_that_exits_is_refused_like_one_that_raises(self) -> None:
        exiting = f'"__init__": lambda self, *arguments, **options: {EXIT},'
        for point in self.points():
            self.install(point, self.complete(point, more=exiting))
            with self.assertRaises(errors.PluginLoadError) as caught:
                point.load("gadget").build()
            self.said(caught.exception.message, point, "SystemExit(4)", "take it out of the configuration")

    def test_one_that_is_not_there(self) -> None:
        for point in self.points():
            with self.assertRaises(errors.PluginLoadError) as caught:
                point.load("gadget")
            for part in ("'gadget'", point.group, f"chosen by {point.option}", "Correct the name, or install"):
                self.assertIn(part, caught.exception.message)

    def test_the_command_says_the_same_and_fails(self) -> None:
        for point in extension_points()[:3]:
            self.install(point, "import no_such_library\n")
            application = mock.Mock()
            command = PluginCheck(application, None)
            self.assertEqual(1, command.take_action(command.get_parser("check").parse_args([])))
            written = "".join(call.args[0] for call in application.stdout.write.call_args_list)
            self.said(written, point, "broken: ", "Repair or uninstall acme")


class RunningTests(FailureCase):
    """Filters and weighers that raise or hang are in tests of the guard, observers in those of the hub."""

    def load(self, point: ExtensionPoint[Any], more: str) -> Any:
        self.install(point, self.complete(point, more=more))
        return point.load("gadget").build()

    def test_whose_an_object_is(self) -> None:
        for point in self.points():
            self.assertEqual(f"plugin 'gadget' ({point.group}, of acme 1.5)", origin_of(self.load(point, "")))
        self.assertEqual("moorage.testing.clock.ManualClock", origin_of(ManualClock()))

    def test_a_strategy_that_raises_refuses_the_plan(self) -> None:
        place = '"assign": lambda self, *arguments: {"u": "a"}, "explain"'
        for method, code, what in (
            ('"assign"', '{}["of no use"]', "KeyError: 'of no use'"),
            ('"assign"', EXIT, "SystemExit(4)"),
            (place, EXIT, "SystemExit(4)"),
        ):
            strategy = self.load(STRATEGIES, f"{method}: lambda self, *arguments: {code},")
            with self.assertRaises(errors.PluginFailed) as caught:
                make_plan("gadget", strategy, [ShardNode("u", "n")], ["a"], {"u": None})
            self.said(
                caught.exception.message.replace("gadget (plugin", "'gadget' (plugin"),
                *(STRATEGIES, what, "Choose another one with --strategy"),
            )

    def test_a_task_that_raises_is_named_in_the_log(self) -> None:
        (point,) = (each for each in extension_points() if each.group == "moorage.periodic_tasks")
        for raising in ('{}["of no use"]', EXIT):
            self.task_is_named(point, raising)

    def task_is_named(self, point: ExtensionPoint[Any], raising: str) -> None:
        for more, what in (
            (f'"list_objects": lambda self: {raising},', "cannot list its objects"),
            (
                f'"list_objects": lambda self: ["one"], "handle": lambda self, object_id, lease: {raising},',
                "handle one",
            ),
        ):
            claims, store = mock.Mock(), mock.Mock()
            claims.claim.side_effect = lambda claim, found: list(found)
            runner = TaskRunner(
                "gadget", self.load(point, more), Settings(1, 60, 1), claims, store,
                lambda: OwnsAll("me", 0), ManualClock(), member="me",
            )  # fmt: skip
            with self.assertLogs("moorage.coordination", "ERROR") as logs:
                ticks = runner.due(10_000_000, None)
                assert ticks is not None
                runner.sweep(ticks)
            (said,) = (record.getMessage() for record in logs.records)
            self.said(said, point, what, "[periodic] enabled_tasks")

    def test_a_cleanup_handler_that_raises_is_named_in_the_log_and_its_row_is_tried_again(self) -> None:
        (point,) = (each for each in extension_points() if each.group == "moorage.cleanup_handlers")
        for code, what in (('{}["of no use"]', "KeyError"), (EXIT, "PluginExit")):
            handler = self.load(point, f'"cleanup": lambda self, lease, resource: {code},')
            self.handler_is_named(point, handler, what)

    def handler_is_named(self, point: ExtensionPoint[Any], handler: Any, what: str) -> None:
        orphans: Any = mock.Mock()
        orphans.requeue.return_value = True
        held: Any = mock.Mock(resource_type="gadget", resource_id="one", status="making", attempts=1)
        cleaner = Cleaner(orphans, {"gadget": handler}, ManualClock(), random.Random(1))
        with self.assertLogs("moorage.cleanup", "ERROR") as logs:
            self.assertEqual("retry", cleaner._one(handler, held, None))
        (said,) = (record.getMessage() for record in logs.records)
        self.said(said, point, f"raised {what} for one", "[cleanup] enabled_handlers")

    def test_everything_said_can_be_sent_on(self) -> None:
        """Details are JSON data, so that an error of one process reaches the user of another."""
        point = extension_points()[0]
        self.install(point, "import no_such_library\n")
        with self.assertRaises(errors.PluginLoadError) as caught:
            point.load("gadget")
        wire = json.loads(json.dumps(errors.to_wire(caught.exception)))
        self.assertEqual(caught.exception.message, errors.from_wire(wire).message)
