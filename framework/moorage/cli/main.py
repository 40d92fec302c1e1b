# SPDX-License-Identifier: Apache-2.0
"""The ``moorage`` command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import metadata

from cliff import app, commandmanager

__all__ = ["MoorageApp", "main"]


class MoorageApp(app.App):
    """cliff's application over all installed commands."""

    def __init__(self) -> None:
        super().__init__(
            description="Moorage: the control plane of a fleet",
            version=metadata.version("moorage"),
            command_manager=commandmanager.CommandManager("moorage.cli"),
            deferred_help=True,
        )

    def configure_logging(self) -> None:
        """Only warnings, and only from our own code: libraries talk too much for a command line."""
        super().configure_logging()
        for name in ("alembic", "keystoneauth", "urllib3", "stevedore", "oslo_service", "oslo_messaging", "amqp"):
            logging.getLogger(name).setLevel(logging.ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``moorage`` script."""
    try:
        return int(MoorageApp().run(list(sys.argv[1:] if argv is None else argv)))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


if __name__ == "__main__":
    sys.exit(main())
