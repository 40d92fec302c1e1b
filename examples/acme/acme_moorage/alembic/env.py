# SPDX-License-Identifier: Apache-2.0
"""What alembic runs; the work is Moorage's."""

from alembic import context

from moorage.db.migrations import run_environment

run_environment(context)
