# SPDX-License-Identifier: Apache-2.0
"""Coordination: which of us does this job (seed 002)."""
