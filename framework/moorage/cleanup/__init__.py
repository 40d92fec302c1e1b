# SPDX-License-Identifier: Apache-2.0
"""Cleanup: finishes or undoes the operations of dead services (seed 004)."""
