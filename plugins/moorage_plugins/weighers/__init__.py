# SPDX-License-Identifier: Apache-2.0
"""Weighers: where does it go best."""
