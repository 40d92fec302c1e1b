# SPDX-License-Identifier: Apache-2.0
"""Allocation: inventories of resources, and claims that never exceed them (seed 001)."""
