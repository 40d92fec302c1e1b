# SPDX-License-Identifier: Apache-2.0
"""Plugins that hung; written by :mod:`moorage.scheduling.incidents` alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, Micros, core_metadata, exact

__all__ = ["plugin_incidents"]

plugin_incidents = sa.Table(
    "plugin_incidents",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("plugin", exact(255), nullable=False),
    sa.Column("at", Micros, nullable=False),
    sa.Index("ix_plugin_incidents_plugin_at", "plugin", "at"),
)
