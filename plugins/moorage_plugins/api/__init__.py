# SPDX-License-Identifier: Apache-2.0
"""Dialects of the API: what clients of existing services speak."""
