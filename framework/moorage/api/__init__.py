# SPDX-License-Identifier: Apache-2.0
"""The HTTP side: one WSGI application made of tables of routes, and the mounts of dialects."""
