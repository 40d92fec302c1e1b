# SPDX-License-Identifier: Apache-2.0
"""Scheduling: where does this go (seed 000)."""
