# SPDX-License-Identifier: Apache-2.0
"""Options of the group ``[rpc]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("rpc", title="Messages between services")

OPTS = [
    cfg.StrOpt(
        "transport_url",
        default="local://",
        secret=True,
        help="How services reach each other. 'local://' joins the processes of one machine through sockets in run_dir; "
        "'memory://' the threads of one process; 'rabbit://user:password@host:5672/vhost' (several hosts: "
        "user:password@host1:5672,user:password@host2:5672) machines through RabbitMQ, with the options of "
        "[oslo_messaging_rabbit].",
    ),
    cfg.FloatOpt("call_timeout", default=60.0, min=0.001, help="Seconds to wait for the reply of a call."),
    cfg.FloatOpt(
        "connect_timeout",
        default=30.0,
        min=0.1,
        help="Seconds that a service which starts waits for the message broker, where there is one; keep it below "
        "[control_plane] start_timeout.",
    ),
    cfg.IntOpt(
        "threads",
        default=16,
        min=1,
        max=1024,
        help="Calls and casts of one topic that a service handles at a time. A scheduler decides as many creates at a time, and "
        "a create keeps its thread until its claim is committed. So fewer claims than this share one transaction "
        "([allocation_sql] claims_per_transaction).",
    ),
    cfg.IntOpt(
        "max_message_bytes",
        default=16 * 1024 * 1024,
        min=1024,
        max=0x7FFFFFFF,
        help="Largest message or reply, in bytes of JSON. A larger one is refused by its sender and by its receiver.",
    ),
    cfg.IntOpt(
        "queue_limit",
        default=1000,
        min=1,
        help="Messages that wait at most: in a receiver for a free thread, in a sender for a slow listener. When it is "
        "reached, calls and casts are refused, and of fanouts the oldest are dropped.",
    ),
    cfg.StrOpt(
        "run_dir",
        help="Folder of the sockets of transport 'local', readable by its owner only. The path in local:///path, where "
        "given, is used instead.",
    ),
]


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the group; harmless when it is registered already."""
    # A group of its own: ConfigOpts copies the given one only on the surface, and would share overrides and defaults with every
    # other ConfigOpts of the process.
    conf.register_group(cfg.OptGroup(GROUP.name, title=GROUP.title))
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[Any]]]:
    """For oslo-config-generator."""
    return [(GROUP.name, OPTS)]
