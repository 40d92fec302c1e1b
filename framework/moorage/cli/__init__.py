# SPDX-License-Identifier: Apache-2.0
"""The commands: moorage (operators), moorage-manage (database), moorage-status (upgrade checks)."""
