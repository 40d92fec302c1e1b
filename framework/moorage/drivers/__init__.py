# SPDX-License-Identifier: Apache-2.0
"""Drivers: plugins by which agents reach what runs the workloads of a host."""
