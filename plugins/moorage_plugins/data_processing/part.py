# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the data processing service."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    options="moorage_plugins.data_processing.options",
    commands={
        "cluster create": "moorage_plugins.data_processing.commands:ClusterCreate",
        "cluster delete": "moorage_plugins.data_processing.commands:ClusterDelete",
        "cluster list": "moorage_plugins.data_processing.commands:ClusterList",
        "cluster reset-state": "moorage_plugins.data_processing.commands:ClusterReset",
        "cluster show": "moorage_plugins.data_processing.commands:ClusterShow",
        "job cancel": "moorage_plugins.data_processing.commands:JobCancel",
        "job create": "moorage_plugins.data_processing.commands:JobCreate",
        "job delete": "moorage_plugins.data_processing.commands:JobDelete",
        "job list": "moorage_plugins.data_processing.commands:JobList",
        "job show": "moorage_plugins.data_processing.commands:JobShow",
        "proxy user list": "moorage_plugins.data_processing.commands:ProxyUserList",
    },
    periodic_tasks={
        "cluster_health": "moorage_plugins.data_processing.tasks:ClusterHealth",
        "check_for_zombie_proxy_users": "moorage_plugins.data_processing.tasks:ZombieProxyUsers",
        "terminate_incomplete_clusters": "moorage_plugins.data_processing.tasks:TerminateIncompleteClusters",
        "terminate_unneeded_transient_clusters": "moorage_plugins.data_processing.tasks:TerminateUnneededTransientClusters",
        "update_job_statuses": "moorage_plugins.data_processing.tasks:UpdateJobStatuses",
    },
)
