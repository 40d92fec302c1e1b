# SPDX-License-Identifier: Apache-2.0
"""An image for containers, made of busybox, and what runs in containers, read from the processes of the machine."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from tests.functional.compute.sandboxes import guards, pids_of_instance

__all__ = ["copies_of", "make_image", "require_runc"]

_BUSYBOX = Path("/bin/busybox")


def require_runc(test: unittest.TestCase) -> None:
    """Skips the test where no containers can be made; fails it where all that bindep.txt lists is required and is not installed."""
    missing = [name for name in ("runc", "unshare") if shutil.which(name) is None]
    missing += [] if _BUSYBOX.exists() else [str(_BUSYBOX)]
    if missing:
        text = f"{', '.join(missing)} not installed (bindep.txt: runc, busybox-static)"
        if os.environ.get("MOORAGE_REQUIRE_SERVERS"):
            test.fail(text)
        test.skipTest(text)
    if os.getuid() != 0:
        test.skipTest("only an agent that is root makes containers")
    if refusal := _refusal():
        test.skipTest(refusal)


@functools.cache
def _refusal() -> str:
    """What the system says against a container in a user namespace and a control group; empty when runc makes one."""
    with tempfile.TemporaryDirectory(prefix="moorage-try-") as folder:
        os.chmod(folder, 0o755)
        image = make_image(Path(folder) / "images")
        mapping = [{"containerID": 0, "hostID": 700_000, "size": 1}]
        config = {
            "ociVersion": "1.0.2",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["true"], "env": ["PATH=/bin"], "cwd": "/"},
            "root": {"path": str(image / "rootfs"), "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            ],
            "linux": {
                "namespaces": [{"type": each} for each in ("user", "pid", "mount")],
                "uidMappings": mapping,
                "gidMappings": mapping,
                "cgroupsPath": f"/moorage/try-{os.getpid()}",
            },
        }
        (image / "config.json").write_text(json.dumps(config))
        runc = ["runc", "--root", f"{folder}/state", "run", "--bundle", str(image), f"try-{os.getpid()}"]
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *runc]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        return f"no container can be made here: {done.stderr.strip()}" if done.returncode else ""


def make_image(images: Path, name: str = "busybox", *, process: dict[str, object] | None = None) -> Path:
    """An image with the programs of busybox; returns its folder.

    :param process: ``process`` of its OCI runtime configuration; None: it has no configuration.
    """
    folder = images / name
    programs = folder / "rootfs" / "bin"
    programs.mkdir(parents=True)
    for each in ("dev", "proc", "tmp", "etc"):
        (folder / "rootfs" / each).mkdir()
    shutil.copy(_BUSYBOX, programs / "busybox")
    listed = subprocess.run([str(_BUSYBOX), "--list"], capture_output=True, text=True, check=True).stdout.split()
    for each in listed:
        if each != "busybox":
            (programs / each).symlink_to("busybox")
    if process is not None:
        (folder / "config.json").write_text(json.dumps({"ociVersion": "1.0.2", "process": process}))
    # Containers run as users of their own.
    for path in (images, folder):
        path.chmod(0o755)
    return folder


def copies_of(uuid: str, folder: Path) -> list[int]:
    """The processes of an instance's containers, of guardians of this folder or without one."""
    return [pid for pid in pids_of_instance(uuid) if guards(folder, pid)]
