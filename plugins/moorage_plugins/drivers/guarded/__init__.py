# SPDX-License-Identifier: Apache-2.0
"""Compute drivers whose workloads run in sandboxes on the agent's machine, watched by guardian processes that survive it."""
