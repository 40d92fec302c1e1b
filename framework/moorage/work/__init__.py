# SPDX-License-Identifier: Apache-2.0
"""The work engine: operations, their leases, tokens and fences."""
