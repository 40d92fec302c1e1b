# SPDX-License-Identifier: Apache-2.0
"""The Placement dialect: OpenStack Placement's REST API, microversions 1.0 to 1.39, over the allocation store."""
