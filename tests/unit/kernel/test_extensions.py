# SPDX-License-Identifier: Apache-2.0
"""Loading plugins from real distributions that are written into a folder on sys.path."""

from __future__ import annotations

import abc
import importlib
import importlib.metadata
import pathlib
import re
import shutil
import sys
import tempfile
import textwrap
import unittest
from unittest import mock

from moorage import errors, extensions, importing

GROUP = "moorage.test_things"


class Thing(abc.ABC):
    """The interface of the tests."""

    @abc.abstractmethod
    def act(self) -> str:
        """Act."""

    @extensions.deprecated(since=(1, 2), instead="implement act")
    def do(self) -> str:
        """The old name of act."""
        return self.act()


class PluginCase(unittest.TestCase):
    """Gives tests a folder of installed distributions."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.site = pathlib.Path(folder.name)
        sys.path.insert(0, folder.name)
        self.addCleanup(sys.path.remove, folder.name)
        self.addCleanup(importlib.invalidate_caches)
        self.point = extensions.ExtensionPoint(GROUP, Thing, (1, 2), "[things] enabled")

    def install(self, distribution: str, entry: str, code: str, version: str = "1.0") -> None:
        """Write a module and the metadata that names it, as pip would."""
        module = entry.partition("=")[2].partition(":")[0].strip()
        (self.site / f"{module}.py").write_text(textwrap.dedent(code))
        info = self.site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        with open(info / "entry_points.txt", "a") as points:
            points.write(f"[{GROUP}]\n{entry}\n")
        importlib.invalidate_caches()
        self.addCleanup(sys.modules.pop, module, None)

    GOOD = """
        from tests.unit.kernel.test_extensions import Thing
        class It(Thing):
            '''Does its thing.'''
            api_version = (1, 0)
            def act(self):
                return "acted"
        """

    def refusal(self, name: str) -> errors.PluginLoadError:
        with self.assertRaises(errors.PluginLoadError) as caught:
            self.point.load(name)
        return caught.exception


class TestLoading(PluginCase):
    def test_a_plugin_installed_a_moment_ago_is_found(self) -> None:
        self.assertEqual([], self.point.survey())
        self.install("acme", "it = acme_one:It", self.GOOD)
        loaded = self.point.load("it")
        self.assertEqual(("acme", "1.0", "acted"), (loaded.distribution, loaded.version, loaded.plugin().act()))
        (finding,) = self.point.survey()
        self.assertEqual((extensions.PluginState.READY, "Does its thing."), (finding.state, finding.summary))

    def test_what_is_installed_is_read_once_until_something_is_installed_changed_or_removed(self) -> None:
        def names() -> set[str]:
            with mock.patch.object(importlib.metadata, "entry_points", wraps=importlib.metadata.entry_points) as read:
                found = {point.name for point in extensions.entry_points(GROUP)}
                self.assertEqual(found, {point.name for point in extensions.entry_points(GROUP)})
            self.reads = read.call_count
            return found

        self.install("acme", "it = acme_read:It", self.GOOD)
        self.assertEqual(({"it"}, 1), (names(), self.reads))
        self.assertEqual(({"it"}, 0), (names(), self.reads))
        self.install("acme", "more = acme_read:It", self.GOOD)
        self.assertEqual(({"it", "more"}, 1), (names(), self.reads))
        shutil.rmtree(self.site / "acme-1.0.dist-info")
        self.assertEqual((set(), 1), (names(), self.reads))

    def test_a_missing_plugin_is_refused_with_what_is_offered_and_who_chose_it(self) -> None:
        self.install("acme", "it = acme_two:It", self.GOOD)
        message = self.refusal("that").message
        for part in ("'that'", GROUP, "[things] enabled", "it"):
            self.assertIn(part, message)

    def test_an_import_error_names_distribution_and_cause(self) -> None:
        self.install("acme", "it = acme_three:It", "import no_such_library\n")
        message = self.refusal("it").message
        for part in ("'it'", "acme 1.0", "no_such_library", "uninstall acme"):
            self.assertIn(part, message)

    def test_what_only_the_author_can_mend_is_said_to_be_so(self) -> None:
        mistake = (
            "This is a mistake in acme, which its author must mend. Repair or uninstall acme, or take the plugin out of"
        )
        for number, (code, target, is_one) in enumerate(
            (
                ("def (:\n", "It", True),
                ("It = Undefined\n", "It", True),
                (self.GOOD, "Nope", True),
                ("from {module} import nothing\n", "It", True),
                ("import {module}.nothing\n", "It", True),
                ("import no_such_library\n", "It", False),
                ("import os\nIt = os.of_a_newer_python\n", "It", False),
                ("raise ValueError('no licence file')\n", "It", False),
            )
        ):
            module = f"acme_m{number}"
            self.install("acme", f"m{number} = {module}:{target}", code.replace("{module}", module))
            with self.subTest(code=code, target=target):
                message = self.refusal(f"m{number}").message
                self.assertEqual(is_one, mistake in message, message)
                self.assertIn("Repair or uninstall acme", message)
        self.install("acme", "absent = acme_m0:It", "")
        (self.site / "acme_m0.py").unlink()
        sys.modules.pop("acme_m0", None)
        importlib.invalidate_caches()
        self.assertIn(mistake, self.refusal("absent").message)

    def test_what_is_loaded_is_named_with_its_version_in_one_way(self) -> None:
        self.install(
            "acme",
            "it = acme_who:It",
            self.GOOD + "    def __init__(self, broken):\n                raise ValueError('no')\n",
        )
        loaded = self.point.load("it")
        self.assertEqual(f"plugin 'it' ({GROUP}, of acme 1.0)", loaded.who)
        self.assertEqual(loaded.who, extensions.origin_of(loaded.plugin.__new__(loaded.plugin)))
        with self.assertRaisesRegex(
            errors.PluginLoadError, "^The " + re.escape(loaded.who) + " cannot be built: ValueError: no"
        ):
            loaded.build(True)

    def test_text_that_cannot_be_sent_or_shown_comes_escaped_into_messages(self) -> None:
        self.install("acme", "it = acme_raw:It", "raise ValueError('\\ud800\\x1b[31m\\n')\n")
        self.assertIn(r"(ValueError: \ud800\x1b[31m\n)", self.refusal("it").message)
        code = self.GOOD + "    def __init__(self):\n                raise ValueError('\\ud800\\x1b[31m\\n')\n"
        self.install("acme", "built = acme_raw_too:It", code)
        with self.assertRaises(errors.PluginLoadError) as caught:
            self.point.load("built").build()
        self.assertIn(r"cannot be built: ValueError: \ud800\x1b[31m\n. Repair", caught.exception.message)

    def test_a_missing_extra_is_named_as_a_pip_command(self) -> None:
        self.install("acme", "it = acme_four:It [gpu]", "import no_such_library\n")
        self.assertIn("pip install 'acme[gpu]'", self.refusal("it").message)

    def test_a_module_that_exits_or_asserts_does_not_stop_the_host(self) -> None:
        self.install("acme", "it = acme_five:It", "raise SystemExit(3)\n")
        self.assertIn("SystemExit", self.refusal("it").message)
        self.install("zeta", "other = zeta_five:It", "assert False, 'no good'\n")
        self.assertIn("no good", self.refusal("other").message)

    def test_a_module_that_hangs_is_refused_in_time(self) -> None:
        self.install("acme", "it = acme_six:It", "import threading\nthreading.Event().wait(20)\n")
        with mock.patch.object(importing, "PROCESSOR_LIMIT", 0.02), self.assertRaises(errors.PluginTimeout) as raised:
            self.point.load("it")
        self.assertIn("within 0.02 seconds of processor time and 0.2 seconds of wall time", raised.exception.message)
        self.assertNotIsInstance(raised.exception, errors.ConfigError)

    def test_a_module_that_computes_is_late_by_its_processor_time(self) -> None:
        self.install("acme", "it = acme_computes:It", "while True:\n    pass\n")
        with (
            mock.patch.multiple(importing, PROCESSOR_LIMIT=0.2, WALL_FACTOR=1000),
            self.assertRaises(errors.PluginTimeout),
        ):
            self.point.load("it")

    def test_a_module_that_only_waits_for_the_processor_is_not_late(self) -> None:
        # A wait stands for the processor being busy with other processes: it costs wall time only.
        self.install("acme", "it = acme_waits:It", "import time\ntime.sleep(0.5)\n" + textwrap.dedent(self.GOOD))
        with mock.patch.multiple(importing, PROCESSOR_LIMIT=0.2, WALL_FACTOR=100):
            self.assertEqual("it", self.point.load("it").name)

    def test_modules_of_moorage_have_no_limit(self) -> None:
        self.install("moorage", "it = moorage_slow:It", "import time\ntime.sleep(0.5)\n" + textwrap.dedent(self.GOOD))
        with mock.patch.multiple(importing, PROCESSOR_LIMIT=0.001, WALL_FACTOR=1):
            self.assertEqual("it", self.point.load("it").name)

    def test_two_owners_of_a_name_are_both_named(self) -> None:
        self.install("acme", "it = acme_seven:It", self.GOOD)
        self.install("zeta", "it = zeta_seven:It", self.GOOD)
        error = self.refusal("it")
        self.assertEqual("duplicate", error.details["state"])
        for part in ("acme_seven:It (acme 1.0)", "zeta_seven:It (zeta 1.0)", "Uninstall one"):
            self.assertIn(part, error.message)

    def test_versions_of_the_interface(self) -> None:
        template = self.GOOD
        for number, (declared, accepted) in enumerate(
            [
                ("(1, 0)", True),
                ("(1, 2)", True),
                ("(1, 3)", False),
                ("(2, 0)", False),
                ("(0, 9)", False),
                ("None", False),
            ]
        ):
            with self.subTest(declared):
                self.install("acme", f"v{number} = acme_v{number}:It", template.replace("(1, 0)", declared))
                if accepted:
                    self.point.load(f"v{number}")
                else:
                    error = self.refusal(f"v{number}")
                    self.assertEqual("wrong-api", error.details["state"])
                    self.assertIn("offers 1.2", error.message)

    def test_a_version_that_is_none_is_refused_and_a_base_does_not_stand_in_for_it(self) -> None:
        code = (
            self.GOOD
            + """
        class Bad(It):
            api_version = {}
        """
        )
        for number, written in enumerate(("'one'", "[1, 0]", "(1,)", "(1, 0, 0)", "(1, '0')", "(True, 0)", "1.0")):
            with self.subTest(written):
                self.install("acme", f"w{number} = acme_w{number}:Bad", code.format(written))
                error = self.refusal(f"w{number}")
                self.assertEqual("wrong-api", error.details["state"])
                self.assertIn(f"it declares api_version = {written}, this Moorage offers 1.2.", error.message)
                self.assertIn("mistake in acme: its author must write", error.message)
                self.assertIn("two whole numbers, api_version = (1, 2)", error.message)

    def test_a_class_of_another_type_or_with_missing_methods_is_refused(self) -> None:
        self.install("acme", "it = acme_eight:It", "class It:\n    api_version = (1, 0)\n")
        self.assertIn("not a subclass", self.refusal("it").message)
        self.install(
            "zeta",
            "other = zeta_eight:It",
            "from tests.unit.kernel.test_extensions import Thing\nclass It(Thing):\n    api_version = (1, 0)\n",
        )
        self.assertIn("lacks the methods act", self.refusal("other").message)

    def test_a_plugin_for_an_older_interface_loads_and_works(self) -> None:
        """Written for 1.0, when there was only ``act``: what came since has defaults."""
        self.install("acme", "it = acme_old:It", self.GOOD)
        plugin = self.point.load("it").plugin
        self.assertEqual(("acted", "acted"), (plugin().act(), plugin().do()))

    def test_what_is_deprecated_works_and_is_told_of_once_with_plugin_distribution_and_remedy(self) -> None:
        old = self.GOOD + "    def do(self):\n                return 'done'\n"
        self.install("acme", "it = acme_deprecated:It", old, version="1.5")
        self.install("zeta", "good = acme_up_to_date:It", self.GOOD)
        with self.assertLogs("moorage.extensions", "WARNING") as logs:
            for _ in range(3):
                self.assertEqual("done", self.point.load("it").plugin().do())
                self.point.load_all(["good", "it"])
        (said,) = (record.getMessage() for record in logs.records)
        self.assertEqual(
            f"Plugin 'it' of acme 1.5 in group {GROUP}: it implements do, which is deprecated since api_version 1.2: implement "
            "act. It will not be called any more from api_version 2.0 on; ask for a newer acme.",
            said,
        )
        by_name = {finding.name: finding for finding in self.point.survey()}
        self.assertEqual(extensions.PluginState.READY, by_name["it"].state)
        self.assertEqual(("", True), (by_name["good"].warning, "implements do" in by_name["it"].warning))

    def test_a_plugin_that_is_deprecated_as_a_whole_works_under_its_old_name_and_is_told_of_once(self) -> None:
        old = """
            from moorage.extensions import deprecated_plugin
            from tests.unit.kernel.test_extensions import Thing

            class It(Thing):
                api_version = (1, 0)
                def act(self):
                    return "acted"

            @deprecated_plugin(since="acme 2.0", instead="choose new")
            class Old(It):
                pass

            class Derived(Old):
                pass
            """
        self.install(
            "acme", "new = acme_renamed:It\nold = acme_renamed:Old\nown = acme_renamed:Derived", old, version="2.0"
        )
        with self.assertLogs("moorage.extensions", "WARNING") as logs:
            for _ in range(3):
                self.assertEqual("acted", self.point.load("old").plugin().act())
                self.point.load_all(["new", "old", "own"])
        (said,) = (record.getMessage() for record in logs.records)
        self.assertEqual(
            f"Plugin 'old' of acme 2.0 in group {GROUP}: it is deprecated since acme 2.0: choose new.", said
        )
        with extensions.noting() as noted, self.assertNoLogs("moorage.extensions", "WARNING"):
            for _ in range(2):
                self.point.load_all(["new", "old", "own"])
        self.assertEqual(["old"], [each.name for each in noted])

    def test_a_constructor_that_raises_is_named_unless_its_words_are_meant_for_the_deployer(self) -> None:
        raising = self.GOOD + "    def __init__(self, error):\n                raise error\n"
        self.install("acme", "it = acme_raising:It", raising, version="1.5")
        loaded = self.point.load("it")
        for error in (errors.ConfigError("[it] option is wrong."), errors.StoreUnavailable("The store is away.")):
            with self.assertRaises(type(error)) as caught:
                loaded.build(error)
            self.assertIs(error, caught.exception)
        for mistake in (RuntimeError("no licence"), errors.InvalidInput("no licence", path="x")):
            with self.assertRaises(errors.PluginLoadError) as named:
                loaded.build(mistake)
            self.assertEqual(
                f"The plugin 'it' ({GROUP}, of acme 1.5) cannot be built: {type(mistake).__name__}: no licence. Repair it, its "
                "options, or take it out of the configuration.",
                named.exception.message,
            )

    def test_load_all_keeps_the_given_order_and_lists_every_refusal(self) -> None:
        self.install("acme", "b = acme_nine:It", self.GOOD)
        self.install("zeta", "a = zeta_nine:It", self.GOOD)
        self.assertEqual(["b", "a"], [each.name for each in self.point.load_all(["b", "a"])])
        with self.assertRaises(errors.PluginLoadError) as caught:
            self.point.load_all(["b", "x", "y"])
        self.assertIn("'x'", caught.exception.message)
        self.assertIn("'y'", caught.exception.message)

    def test_a_name_given_twice_is_refused(self) -> None:
        self.install("acme", "it = acme_ten:It", self.GOOD)
        with self.assertRaises(errors.PluginLoadError) as caught:
            self.point.load_all(["it", "it"])
        self.assertIn("more than once", caught.exception.message)
