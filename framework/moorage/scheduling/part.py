# SPDX-License-Identifier: Apache-2.0
"""What the part brings: filters, weighers and the scheduler."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.scheduling.interface",
    options="moorage.scheduling.options",
    checks={
        "filters": "moorage.scheduling.filter_and_weigh:load_filters",
        "weighers": "moorage.scheduling.filter_and_weigh:load_weighers",
        "filters and weighers": "moorage.scheduling.filter_and_weigh:load",
    },
    api=("moorage.scheduling.api", "moorage.scheduling.flavors_api"),
)
