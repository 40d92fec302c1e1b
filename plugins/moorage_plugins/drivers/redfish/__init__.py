# SPDX-License-Identifier: Apache-2.0
"""The compute driver ``redfish``: instances on whole machines, through their BMCs."""
