# SPDX-License-Identifier: Apache-2.0
"""Keeps the configuration files that were accepted last, for processes that restart while the files are refused.

``moorage up`` writes the copy, and its children read nothing else: the supervisor alone reads the deployer's files. A role that
runs alone writes a copy when it is ready and after each reload; it starts with the copy only when it cannot start with the files.
The copies lie in ``accepted/`` of the state folder. Only their owner can read them: they hold passwords.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors
from moorage.control_plane import config_files

__all__ = ["AcceptedCopy", "ConfigSource", "Contents", "load_unchanged"]

LOG = logging.getLogger(__name__)

#: Contents of the files in the order in which they are read, with the name of each.
Contents = Sequence[tuple[str, bytes]]

#: Environment variables of a role's process: the copy that it must use, and the copy that it starts with once.
_CHILD, _FALLBACK = "MOORAGE_ACCEPTED_CONFIG", "MOORAGE_FALLBACK_CONFIG"
_READ_ATTEMPTS = 5
_STATE_DIR = re.compile(r"^state_dir\s*[=:]\s*(\S.*?)\s*$", re.MULTILINE)
_DEFAULT_STATE_DIR = "/var/lib/moorage"


def load_unchanged(files: Sequence[str], load: Callable[[], cfg.ConfigOpts]) -> tuple[cfg.ConfigOpts, Contents]:
    """Load a configuration, and return it with exactly the contents that it was loaded from.

    :raises ConfigError: the configuration cannot be used, or an editor keeps writing the files.
    """
    for _ in range(_READ_ATTEMPTS):
        before = _read(files)
        conf = load()
        if _read(files) == before:
            return conf, before
    raise errors.ConfigError(
        f"The configuration files changed {_READ_ATTEMPTS} times while they were read. Write them, then try again."
    )


def _read(files: Sequence[str]) -> Contents:
    chosen = config_files.chosen(files)
    for file in chosen:
        config_files.refuse_unreadable(file)
    try:
        return [(os.path.basename(file), Path(file).read_bytes()) for file in chosen]
    except OSError as error:
        raise errors.ConfigError(
            f"The configuration file {error.filename} cannot be read: {error.strerror}."
        ) from error


class AcceptedCopy:
    """One owner's copy of the configuration files that it accepted last.

    Each copy is a folder that is complete before a link, ``current``, is moved to it. A reader follows the link once, so it never
    sees parts of two configurations.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self) -> dict[str, str]:
        """Returns the variable that makes a role's process read this copy only."""
        return {_CHILD: str(self.folder)}

    def store(self, contents: Contents) -> None:
        """Replace the copy, and forget the reason of the last refusal.

        :raises OSError: it cannot be written; the old copy stays.
        """
        if self.contents() != contents:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # mkdtemp gives the folder to its owner alone.
            made = Path(tempfile.mkdtemp(prefix="copy-", dir=self.folder))
            for number, (name, data) in enumerate(contents):
                _write(made / f"{number:03}-{name}", data)
            self._publish(made)
        self.explain_refusal("")

    def _publish(self, made: Path) -> None:
        link, draft = self.folder / "current", self.folder / "current.new"
        before = os.path.realpath(link)
        draft.unlink(missing_ok=True)
        draft.symlink_to(made.name)
        os.replace(draft, link)
        # A process that has just started may be reading the copy before this one; only older ones go.
        for each in self.folder.glob("copy-*"):
            if each != made and str(each) != before:
                shutil.rmtree(each, ignore_errors=True)

    def files(self) -> list[str]:
        """Returns the files of the copy in their order.

        :raises ConfigError: there is no copy.
        """
        current = self.folder / "current"
        if not current.is_dir():
            raise errors.ConfigError(f"There is no accepted copy of the configuration in {self.folder}.")
        return [str(each) for each in sorted(Path(os.path.realpath(current)).iterdir())]

    def contents(self) -> Contents | None:
        """What was stored; None when there is nothing that can be read."""
        try:
            return [(Path(file).name.partition("-")[2], Path(file).read_bytes()) for file in self.files()]
        except (errors.ConfigError, OSError):
            return None

    def explain_refusal(self, reason: str) -> None:
        """Keep the reason why the deployer's files were refused, for processes that start later; empty: they were accepted."""
        note = self.folder / "refused"
        with contextlib.suppress(OSError):
            if not reason:
                note.unlink(missing_ok=True)
                return
            _write(note.with_suffix(".new"), reason.encode())
            os.replace(note.with_suffix(".new"), note)

    def warning(self, reason: str = "") -> str:
        """Returns a sentence that says which copy is used and why; empty when the deployer's files were not refused."""
        with contextlib.suppress(OSError):
            reason = reason or (self.folder / "refused").read_text(encoding="utf-8")
        if not reason:
            return ""
        with contextlib.suppress(OSError):
            at = datetime.datetime.fromtimestamp(
                os.stat(os.path.realpath(self.folder / "current")).st_mtime, datetime.UTC
            )
            accepted = f", accepted at {at:%Y-%m-%dT%H:%M:%SZ}"
            return f"The configuration in use is the copy in {self.folder / 'current'}{accepted}. The files were refused: {reason}"
        return ""


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


class ConfigSource:
    """Where the process of one role reads its configuration: the deployer's files, or an accepted copy of them.

    :param load: loads from the named files; with ``alone``, from no other file.
    :param files: what the command line names.
    :param state_dir: what the command line says, or None.
    :param owner: the role and the name of its service.
    :param environment: variables of this process; those for this class are taken out.
    """

    def __init__(
        self,
        load: Callable[[Sequence[str], bool], cfg.ConfigOpts],
        files: Sequence[str],
        state_dir: str | None,
        owner: str,
        environment: MutableMapping[str, str],
    ) -> None:
        self._load = load
        self._files = files
        self._owner = quote(owner, safe="")
        self._environment = environment
        child, fallback = environment.pop(_CHILD, ""), environment.pop(_FALLBACK, "")
        self._supervised = bool(child)
        self._reason = fallback
        self._copy = AcceptedCopy(Path(child) if child else self._folder(Path(state_dir or self._written_state_dir())))
        self._read: Contents = ()

    def load(self) -> cfg.ConfigOpts:
        """Returns the configuration to use now.

        :raises ConfigError: it cannot be used.
        """
        if self._supervised or self._reason:
            return self._load(self._copy.files(), True)
        conf, self._read = load_unchanged(self._files, lambda: self._load(self._files, False))
        if not self._supervised:
            self._copy = AcceptedCopy(self._folder(Path(conf.control_plane.state_dir)))
        return conf

    def warning(self) -> str:
        """Which copy is used and why; empty when the deployer's files are used or equal the copy."""
        return self._copy.warning(self._reason) if self._supervised or self._reason else ""

    def accept(self) -> None:
        """The process works with what :meth:`load` read last: keep a copy of it."""
        if self._supervised or self._reason:
            # What comes next is a reload. It reads the deployer's files.
            self._reason = ""
            return
        try:
            self._copy.store(self._read)
        except OSError as error:
            LOG.warning(
                "The accepted configuration cannot be copied to %s (%s). If the files are refused later, a restart of this "
                "service fails. Make the folder writable, then reload.",
                self._copy.folder,
                error.strerror,
            )

    def fall_back(self, reason: str) -> Callable[[], NoReturn] | None:
        """How to start this process again with the accepted copy; None when no copy can help.

        :param reason: why it cannot start with the deployer's files.
        """
        if self._supervised or self._reason:
            return None
        copy = self._copy.contents()
        with contextlib.suppress(errors.ConfigError):
            if _read(self._files) == copy:
                return None
        return None if copy is None else lambda: self._start_again(reason)

    def _start_again(self, reason: str) -> NoReturn:
        # A new program, and not a second try in this one: the first may have left threads and half of a service behind.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**self._environment, _FALLBACK: reason})  # noqa: S606

    def _folder(self, state_dir: Path) -> Path:
        return state_dir / "accepted" / self._owner

    def _written_state_dir(self) -> str:
        """Returns the state folder that the files name. They may be wrong elsewhere, so they are searched for this one line."""
        found = _DEFAULT_STATE_DIR
        for file in config_files.chosen(self._files):
            with contextlib.suppress(OSError):
                found = [found, *_STATE_DIR.findall(Path(file).read_text(encoding="utf-8", errors="replace"))][-1]
        return found
