# SPDX-License-Identifier: Apache-2.0
"""Acme's plugins for Moorage: one of each family."""
