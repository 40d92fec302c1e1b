# SPDX-License-Identifier: Apache-2.0
"""Which part of the fleet is whose: the shard field of nodes, and plans that change many of them with few moves."""
