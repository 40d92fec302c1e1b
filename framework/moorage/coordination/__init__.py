# SPDX-License-Identifier: Apache-2.0
"""Coordination: divides periodic work among engines by a hash ring (seed 002)."""
