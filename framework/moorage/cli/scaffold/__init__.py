# SPDX-License-Identifier: Apache-2.0
"""Whole distributions for authors of plugins, written from templates: ``moorage plugin new``."""
