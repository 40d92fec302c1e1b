# SPDX-License-Identifier: Apache-2.0
"""The bare metal dialect: what clients of OpenStack Ironic use of nodes, ports, portgroups and shards, microversions 1.1 to 1.115.

It is for consumers that work on their shard of the fleet, and for operators who know those clients. Machines are not powered,
cleaned or deployed through it.
"""
