# SPDX-License-Identifier: Apache-2.0
"""Backends of coordination: zookeeper, tooz (any URL), database, memory."""
