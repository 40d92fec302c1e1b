# SPDX-License-Identifier: Apache-2.0
"""Services: their heartbeats, epochs and liveness."""
