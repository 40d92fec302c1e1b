# SPDX-License-Identifier: Apache-2.0
"""The Python client of the REST API, which the command line uses too."""

from moorage.client.client import Client, connect

__all__ = ["Client", "connect"]
