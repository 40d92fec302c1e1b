# SPDX-License-Identifier: Apache-2.0
"""Cleanup: who finishes what a dead service left behind (seed 004)."""
