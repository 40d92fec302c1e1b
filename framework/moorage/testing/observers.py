# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of observers.

Mix it into a ``unittest.TestCase`` and say how the observer is made::

    class MyObserverTests(ObserverTests, unittest.TestCase):
        def make_observer(self, tools):
            return MyObserver(tools)

        def list_opts(self):
            return my_package.options.list_opts()
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from oslo_config import cfg

from moorage.clock import SystemClock
from moorage.extensions import Loaded
from moorage.observers.hub import ObserverHub
from moorage.observers.interface import (
    EVENTS,
    OBSERVERS,
    Notice,
    Observer,
    ObserverEvent,
    ObserverTools,
    ProcessIdentity,
)

__all__ = ["ObserverTests", "event"]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

#: Seconds within which what must happen happens, on a machine that has much else to do.
_SOON = 60.0
#: Names that users may choose.
_TEXTS = ("web-1", "", "two\nlines", "nul \0", "Grüße ☃", 'quote " and \\ and %s {0}', "x" * 5000)


def event(kind: type[ObserverEvent], text: str = "something", number: int = 7) -> ObserverEvent:
    """Returns an event of that kind, with the text and the number wherever it has one."""
    values: dict[str, Any] = {"str": text, "int": number, "Mapping[str, int]": {text: number}}
    fields: Sequence[Any] = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{each.name: values[each.type] for each in fields})


class ObserverTests(_Base):
    """What every observer must hold to."""

    def make_observer(self, tools: ObserverTools) -> Observer:
        """Returns a new observer."""
        raise NotImplementedError

    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        """Returns the options that it reads, as its distribution registers them."""
        return ()

    def configure(self, conf: cfg.ConfigOpts) -> None:
        """Set what the test needs."""

    # -- helpers --------------------------------------------------------------------------------------------------

    def tools(self, number: int = 1) -> ObserverTools:
        """What it is built with: its options, and a state folder of the test's own."""
        conf = cfg.ConfigOpts()
        conf.register_opts([cfg.StrOpt("state_dir")], group="control_plane")
        for group, options in self.list_opts():
            conf.register_opts(options, group=group)
        conf([])
        folder = tempfile.TemporaryDirectory(prefix="moorage-observer-")
        self.addCleanup(folder.cleanup)
        conf.set_override("state_dir", folder.name, group="control_plane")
        self.configure(conf)
        source = ProcessIdentity("00000000-0000-4000-8000-000000000001", "scheduler", f"scheduler-{number}", 3)
        return ObserverTools(conf, SystemClock(), source)

    def notice(self, of: ObserverEvent, sequence: int = 1) -> Notice:
        """As the control plane would tell it."""
        return Notice(
            of, ProcessIdentity("00000000-0000-4000-8000-000000000001", "scheduler", "scheduler-1", 3), sequence, 1e9
        )

    def wanted(self, observer: Observer) -> list[type[ObserverEvent]]:
        """Returns the kinds of events that the observer receives."""
        return [kind for name, kind in EVENTS.items() if observer.kinds is None or name in observer.kinds]

    @contextlib.contextmanager
    def hub(self, *observers: Observer) -> Iterator[ObserverHub]:
        """The production code around observers; ends with the block."""
        made = ObserverHub(
            ProcessIdentity("00000000-0000-4000-8000-000000000001", "scheduler", "scheduler-1", 3), SystemClock()
        )
        made.use([(self._loaded(each, number), each) for number, each in enumerate(observers)])
        try:
            yield made
        finally:
            made.close(_SOON)

    @staticmethod
    def _loaded(observer: Observer, number: int) -> Loaded[Observer]:
        return Loaded(f"under-test-{number}", type(observer), "kit", "1", OBSERVERS.group)

    # -- the law --------------------------------------------------------------------------------------------------

    def test_the_kinds_that_it_wants_exist(self) -> None:
        observer = self.make_observer(self.tools())
        if observer.kinds is not None:
            self.assertIsInstance(observer.kinds, frozenset)
            self.assertEqual(frozenset(), observer.kinds - EVENTS.keys())

    def test_it_takes_every_event_whatever_names_are_in_it(self) -> None:
        observer = self.make_observer(self.tools())
        number = 0
        for kind in self.wanted(observer):
            for text in _TEXTS:
                number += 1
                observer.observe(self.notice(event(kind, text, number), number))
        observer.flush()
        observer.close()

    def test_it_ends_without_having_been_told_anything(self) -> None:
        observer = self.make_observer(self.tools())
        observer.flush()
        observer.close()

    def test_the_control_plane_tells_it_everything_and_is_never_refused(self) -> None:
        observer = self.make_observer(self.tools())
        told = 0
        with self.hub(observer) as hub:
            for _ in range(5):
                for kind in self.wanted(observer):
                    hub.tell(event(kind))
                    told += 1
            deadline = time.monotonic() + _SOON
            while hub.counts()["under-test-0"].told < told and time.monotonic() < deadline:
                time.sleep(0.005)
            counts = hub.counts()["under-test-0"]
        self.assertEqual((told, 0, 0, ""), (counts.told, counts.dropped, counts.errors, counts.off))

    def test_two_do_not_disturb_each_other(self) -> None:
        first, second = self.make_observer(self.tools(1)), self.make_observer(self.tools(2))
        with self.hub(first, second) as hub:
            for kind in self.wanted(first):
                hub.tell(event(kind))
            hub.use([(self._loaded(second, 1), second)])
            self.assertEqual(["under-test-1"], list(hub.counts()))
