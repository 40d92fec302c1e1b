# SPDX-License-Identifier: Apache-2.0
"""Filters: where may it go."""
