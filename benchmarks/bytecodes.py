# SPDX-License-Identifier: Apache-2.0
"""Counts the bytecodes that Python executes to create an instance, in each role, printed as one JSON object.

``python benchmarks/bytecodes.py [--hosts 2000] [--creates 640] [--clients 64] [--under NAME] [--top 40]``

Processor time on a shared machine differs by a third from minute to minute. These counts differ by a few hundredths, and they show
where the work is: a profiler that samples cannot, since threads that wait for the interpreter look as if they worked.

Starts the control plane as ``benchmarks/whole_path.py`` does, and has each role trace every instruction of its threads while
instances are created. Printed for each role, per create: bytecodes and calls by thread, and the functions with the most bytecodes,
those of the functions that they call included. ``--under`` looks only at what functions with NAME in their names call.

Tracing makes a role thirty times as slow. So fewer requests meet than otherwise, and work that is done once for many is counted for
fewer; periodic work is counted too often. ``--clients 1`` shows lone requests. What C code and the system do is not counted.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
from types import CodeType, FrameType
from typing import Any

#: Seconds in which a role begins and ends to count, and writes its counts.
TURN = 1.0
PATIENCE = 60.0
#: The prefixes of the paths of modules that are left out in names.
_PLACES = ("/framework/", "/plugins/", "/site-packages/", f"/python3.{sys.version_info.minor}/")


class Node:
    """The calls of one function by one caller."""

    __slots__ = ("below", "bytecodes", "calls", "trace")

    def __init__(self, frames: dict[FrameType, Node]) -> None:
        self.below: dict[CodeType, Node] = {}
        self.bytecodes = self.calls = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                self.bytecodes += 1
            elif event == "return":
                frames.pop(frame, None)
            return trace

        self.trace = trace

    def plain(self) -> list[Any]:
        return [self.bytecodes, self.calls, {name(code): each.plain() for code, each in self.below.items()}]


class Counter:
    """Counts in one process while the file ``on`` is in the folder, and writes what it has counted there."""

    def __init__(self, folder: str, role: str) -> None:
        self._folder = pathlib.Path(folder)
        self._role = role
        self._counting = False
        self._frames: dict[FrameType, Node] = {}
        self._threads: dict[str, Node] = {}

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="counter").start()
        threading.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._counting:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        above = self._frames.get(frame.f_back) if frame.f_back is not None else None
        if above is None:
            thread = threading.current_thread().name.rstrip("0123456789-")
            above = self._threads.setdefault(thread, Node(self._frames))
        node = above.below.get(frame.f_code)
        if node is None:
            node = above.below[frame.f_code] = Node(self._frames)
        node.calls += 1
        self._frames[frame] = node
        return node.trace

    def _watch(self) -> None:
        while True:
            time.sleep(TURN / 4)
            on = (self._folder / "on").exists()
            if self._counting and not on:
                self._counting = False
                written = self._folder / f"{os.getpid()}.tmp"
                found = {thread: node.plain() for thread, node in list(self._threads.items())}
                written.write_text(json.dumps([self._role, found]))
                written.rename(self._folder / f"{os.getpid()}.json")
            self._counting = on


def name(code: CodeType) -> str:
    path = code.co_filename
    for place in _PLACES:
        _, found, rest = path.rpartition(place)
        if found:
            path = rest
            break
    # All initializers of dataclasses have one name.
    fields = f"({', '.join(code.co_varnames[1:4])}, ...)" if path == "<string>" else ""
    return f"{code.co_qualname}{fields} {path}"


def merge(into: list[Any], more: list[Any]) -> None:
    into[0] += more[0]
    into[1] += more[1]
    for function, node in more[2].items():
        merge(into[2].setdefault(function, [0, 0, {}]), node)


def total(node: list[Any], place: int) -> int:
    """The bytecodes (0) or calls (1) of a function and of what it calls."""
    return int(node[place]) + sum(total(each, place) for each in node[2].values())


def under(node: list[Any], wanted: str) -> list[Any]:
    """The calls of functions with a name, wherever they are called."""
    found: list[Any] = [0, 0, {}]
    for function, each in node[2].items():
        if wanted in function:
            merge(found, [0, 0, {function: each}])
        else:
            merge(found, under(each, wanted))
    return found


def by_function(node: list[Any], above: frozenset[str], found: dict[str, collections.Counter[str]]) -> None:
    for function, each in node[2].items():
        counts = found.setdefault(function, collections.Counter())
        counts["own"] += each[0]
        counts["calls"] += each[1]
        if function not in above:
            counts["bytecodes"] += total(each, 0)
        by_function(each, above | {function}, found)


def report(threads: dict[str, list[Any]], creates: int, top: int, wanted: str) -> dict[str, Any]:
    """What one role did for each create."""
    root: list[Any] = [0, 0, {}]
    for node in threads.values():
        merge(root, under(node, wanted) if wanted else node)
    functions: dict[str, collections.Counter[str]] = {}
    by_function(root, frozenset(), functions)
    ordered = sorted(functions, key=lambda each: -functions[each]["bytecodes"])[:top]
    return {
        "bytecodes": round(total(root, 0) / creates),
        "calls": round(total(root, 1) / creates),
        "threads": {
            thread: round(total(node, 0) / creates)
            for thread, node in sorted(threads.items(), key=lambda each: -total(each[1], 0))
        },
        "functions": {
            function: {key: round(functions[function][key] / creates, 2) for key in ("bytecodes", "own", "calls")}
            for function in ordered
        },
    }


def count(arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, dict[str, list[Any]]]:
    """Create instances while roles count; the counts by role and thread."""
    # Not at the top: roles import this module.
    import whole_path  # noqa: PLC0415

    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'moorage.cli.roles' in sys.orig_argv:\n"
        f"    sys.path.append({str(pathlib.Path(__file__).parent)!r})\n"
        "    import bytecodes\n"
        "    sys.path.pop()\n"
        "    role = sys.orig_argv[sys.orig_argv.index('moorage.cli.roles') + 1]\n"
        f"    bytecodes.Counter({str(folder)!r}, role).start()\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
    plane = whole_path.Plane(folder, arguments)
    try:
        whole_path.started(plane, arguments.schedulers + arguments.agents + 1)
        for page in whole_path.nodes(arguments.hosts, arguments.creates):
            plane.client().import_nodes(page)
        time.sleep(whole_path.READING)
        senders = [plane.sender() for _ in range(arguments.clients)]
        names = [f"warm-{number}" for number in range(max(64, 10 * arguments.clients))]
        whole_path.requests(plane, senders, "create", names)
        (folder / "on").touch()
        time.sleep(TURN)
        whole_path.requests(plane, senders, "create", [f"instance-{number}" for number in range(arguments.creates)])
        (folder / "on").unlink()
        processes = len(json.loads((plane.state / "run" / "processes.json").read_text()))
        deadline = time.monotonic() + PATIENCE
        while len(written := list(folder.glob("*.json"))) < processes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(written)} of {processes} roles have written their counts")
            time.sleep(TURN)
    finally:
        plane.end()
    found: dict[str, dict[str, list[Any]]] = {}
    for path in written:
        role, threads = json.loads(path.read_text())
        for thread, node in threads.items():
            merge(found.setdefault(role, {}).setdefault(thread, [0, 0, {}]), node)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2000)
    parser.add_argument("--creates", type=int, default=640)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--under", default="", help="only what functions with this in their names call")
    parser.add_argument("--top", type=int, default=40, help="functions of each role")
    parser.add_argument("--conf", default="", help="more lines of the configuration")
    arguments = parser.parse_args()
    arguments.schedulers, arguments.agents = 1, 2
    with tempfile.TemporaryDirectory() as folder:
        found = count(arguments, pathlib.Path(folder))
    roles = {
        role: report(threads, arguments.creates, arguments.top, arguments.under)
        for role, threads in sorted(found.items())
    }
    bytecodes = sum(role["bytecodes"] for role in roles.values())
    print(json.dumps({**vars(arguments), "bytecodes": bytecodes, "roles": roles}, indent=2))


if __name__ == "__main__":
    main()
