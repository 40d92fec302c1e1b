# SPDX-License-Identifier: Apache-2.0
"""moorage complete."""

from __future__ import annotations

import argparse
import shlex

from cliff import command

from moorage.cli import tree

__all__ = ["Complete"]

_HEAD = """\
# What bash completes of {programs}; made by: moorage complete
_moorage_words() {{
    case "$1" in
"""
_TAIL = """\
    esac
}}
_moorage() {{
    local path=${{COMP_WORDS[0]##*/}} word words next
    words=$(_moorage_words "$path")
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        next=$(_moorage_words "$path $word")
        if [[ -n $next ]]; then
            path="$path $word"
            words=$next
        fi
    done
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}")
}}
complete -o default -F _moorage {programs}
"""


class Complete(command.Command):
    """Print a script with which bash completes the commands and options of moorage, moorage-manage and moorage-status.

    Write it to a file in /etc/bash_completion.d, or take it into a shell that runs: source <(moorage complete)
    """

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Reads what is installed and prints the script."""
        programs = " ".join(tree.PROGRAMS)
        lines = [
            f"        {shlex.quote(' '.join(each.path))}) echo {shlex.quote(' '.join(each.words))} ;;\n"
            for each in tree.entries(self.app)
        ]
        self.app.stdout.write(_HEAD.format(programs=programs) + "".join(lines) + _TAIL.format(programs=programs))
