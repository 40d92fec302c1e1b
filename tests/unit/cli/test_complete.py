# SPDX-License-Identifier: Apache-2.0
"""What a real bash completes with the script that ``moorage complete`` prints."""

from __future__ import annotations

import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import ClassVar

from moorage.cli import main, manage, status
from tests import servers
from tests.commands import in_process

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
complete -p "${1##*/}" >/dev/null || exit 3
_moorage
printf '%s\\n' "${COMPREPLY[@]}"
"""


class CompletionTests(unittest.TestCase):
    script: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        servers.program("bash")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.script = Path(folder.name) / "moorage"
        found, said, error = in_process(main.main, ["complete"])
        assert found == 0, error
        cls.script.write_text(said)

    def completed(self, *words: str) -> set[str]:
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-u", "-c", ASK, "bash", str(self.script), *words],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        return set(done.stdout.split())

    def test_a_command_is_completed_word_by_word(self) -> None:
        self.assertEqual({"shard"}, self.completed("moorage", "sh"))
        self.assertEqual(
            {"apply", "list", "plan", "rollback", "show", "verify"},
            {word for word in self.completed("moorage", "shard", "") if not word.startswith("-")},
        )
        self.assertEqual({"plan"}, self.completed("moorage", "shard", "pl"))

    def test_options_are_those_of_the_command_after_others_too(self) -> None:
        self.assertEqual({"--strategy"}, self.completed("moorage", "shard", "plan", "--str"))
        self.assertEqual({"--threshold"}, self.completed("moorage", "shard", "plan", "--shards", "2", "--thr"))
        self.assertEqual(set(), self.completed("moorage", "node", "list", "--strategy"))

    def test_the_other_programs_are_completed_too(self) -> None:
        self.assertEqual(
            {"db", "user", "node", "flavor"}, {w for w in self.completed("moorage-manage", "") if w[0] != "-"}
        )
        self.assertEqual({"reassign"}, self.completed("/usr/bin/moorage-manage", "node", "re"))
        self.assertEqual({"--preview"}, self.completed("moorage-manage", "node", "reassign", "rack-a", "new-1", "--p"))
        self.assertEqual({"check", "--help"}, self.completed("moorage-status", "upgrade", ""))
        for parser in (manage.make_parser(), status.make_parser()):
            self.assertIn("--config-file", self.completed(parser.prog, "--c"))
