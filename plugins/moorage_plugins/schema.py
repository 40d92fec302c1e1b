# SPDX-License-Identifier: Apache-2.0
"""The tables of the reference plugins lie in one MetaData: they are one distribution with one history."""

from moorage.db.schema import new_metadata

__all__ = ["plugins_metadata"]

plugins_metadata = new_metadata()
