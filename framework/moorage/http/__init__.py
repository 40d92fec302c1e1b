# SPDX-License-Identifier: Apache-2.0
"""Serves HTTP: applications made of tables of routes, their mounts, and the embedded server."""
