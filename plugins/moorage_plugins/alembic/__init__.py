# SPDX-License-Identifier: Apache-2.0
"""The migrations of the reference plugins."""
