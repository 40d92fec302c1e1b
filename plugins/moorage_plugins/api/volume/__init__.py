# SPDX-License-Identifier: Apache-2.0
"""The volume dialect: of Cinder's REST API what existing clients need to clean after services and to drive block storage."""
