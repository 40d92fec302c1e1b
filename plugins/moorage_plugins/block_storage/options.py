# SPDX-License-Identifier: Apache-2.0
"""Options of the block storage plugin, in the group ``[block_storage]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("block_storage", title="The reference block storage service")

OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "backend_dir",
        default="",
        help="The folder of the backend; all agents of a cluster see the same one. Empty: block_storage in the state folder. Needs "
        "a restart.",
    ),
    cfg.StrOpt(
        "images_dir",
        default="",
        help="A folder with files that volumes can be made from, beside uploaded images. Empty: none. Needs a restart.",
    ),
    cfg.IntOpt(
        "gigabyte_bytes",
        default=2**30,
        min=1,
        mutable=True,
        help="How many bytes a GB of the API has; smaller for trials. Volumes that are there keep their bytes.",
    ),
    cfg.IntOpt(
        "max_volume_gb",
        mutable=True,
        default=1024,
        min=1,
        help="The largest volume that can be asked for, in GB of the API; a larger one is refused with 413. All of a volume is "
        "written when it is made, so that one slip would fill the backend.",
    ),
    cfg.IntOpt(
        "chunk_bytes",
        default=2**20,
        min=1,
        help="Bytes that are copied at a time; between two of them an operation can end. Needs a restart.",
    ),
    cfg.FloatOpt(
        "chunk_delay",
        default=0.0,
        min=0.0,
        help="Seconds that the backend takes for each chunk in addition, to try what interruptions do. Needs a restart.",
    ),
    cfg.IntOpt(
        "operations",
        default=4,
        min=1,
        help="Operations that an agent does at the same time, each in a thread. Needs a restart.",
    ),
    cfg.FloatOpt(
        "collect_interval",
        default=60.0,
        min=0.05,
        help="Seconds between searches for files that no row refers to: those of deleted images, and those that killed or paused "
        "processes left. A search is part of a sweep, so at least [agent] sweep_interval. Needs a restart.",
    ),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_group(cfg.OptGroup(GROUP.name, title=GROUP.title))
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
