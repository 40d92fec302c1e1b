# SPDX-License-Identifier: Apache-2.0
"""The fleet: nodes and aggregates."""
