# SPDX-License-Identifier: Apache-2.0
"""Compute drivers on their kit."""
