# SPDX-License-Identifier: Apache-2.0
"""Deterministic simulation: the roles of a control plane in one process, under one seeded scheduler with virtual time.

A schedule is a function of its workload and its seed. ``make simulate`` runs schedules; the page "Simulation" of the
documentation says what they check.
"""
