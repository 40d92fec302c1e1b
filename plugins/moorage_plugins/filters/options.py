# SPDX-License-Identifier: Apache-2.0
"""Options of the filters, a group for each. A reload takes all of them over."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["list_opts"]


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [
        (
            "filter_num_instances",
            [
                cfg.IntOpt(
                    "max_instances_per_host",
                    mutable=True,
                    default=50,
                    min=1,
                    help="A node with this many instances takes no more (filters num_instances, aggregate_num_instances).",
                )
            ],
        ),
        (
            "filter_io_ops",
            [
                cfg.IntOpt(
                    "max_io_ops_per_host",
                    mutable=True,
                    default=8,
                    min=1,
                    help="A node with this many busy instances takes no more (filters io_ops, aggregate_io_ops).",
                )
            ],
        ),
        (
            "filter_availability_zone",
            [
                cfg.StrOpt(
                    "default_zone",
                    mutable=True,
                    default="nova",
                    help="The zone of nodes whose aggregates say nothing under availability_zone.",
                )
            ],
        ),
        (
            "filter_isolated_hosts",
            [
                cfg.ListOpt(
                    "isolated_images", mutable=True, default=[], help="Ids of images that go to isolated hosts only."
                ),
                cfg.ListOpt("isolated_hosts", mutable=True, default=[], help="Hosts for isolated images."),
                cfg.BoolOpt(
                    "restrict_isolated_hosts_to_isolated_images",
                    mutable=True,
                    default=True,
                    help="Isolated hosts accept isolated images only.",
                ),
            ],
        ),
        (
            "filter_image_properties",
            [
                cfg.StrOpt(
                    "default_architecture",
                    mutable=True,
                    help="The architecture of images that name none, for example x86_64.",
                )
            ],
        ),
        (
            "filter_aggregate_image_properties_isolation",
            [
                cfg.StrOpt(
                    "namespace",
                    mutable=True,
                    help="Only metadata that begin with this and the separator count; none: all.",
                ),
                cfg.StrOpt(
                    "separator",
                    mutable=True,
                    default=".",
                    help="The text between the namespace and the rest of a key.",
                ),
            ],
        ),
    ]
