# SPDX-License-Identifier: Apache-2.0
"""Moorage: a plugin framework for the control planes of fleets."""
