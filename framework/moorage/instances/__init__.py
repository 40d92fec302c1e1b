# SPDX-License-Identifier: Apache-2.0
"""Instances: what is placed. Joins scheduling, allocation, fleet and work."""
