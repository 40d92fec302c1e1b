# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the journal."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    options="moorage.journal.options",
    collectors=("moorage.journal.subscription_metrics:SubscriptionCollector",),
    checks={"webhooks": "moorage.journal.options:allowed_networks"},
    api=("moorage.journal.api", "moorage.journal.webhooks_api"),
)
