# SPDX-License-Identifier: Apache-2.0
"""Allocation: is there room, and is it mine now (seed 001)."""
