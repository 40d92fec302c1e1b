# SPDX-License-Identifier: Apache-2.0
"""Sharding on real databases."""
