# SPDX-License-Identifier: Apache-2.0
"""Sharding: the shard field of nodes, and plans that change many nodes with few moves."""
