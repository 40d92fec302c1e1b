# SPDX-License-Identifier: Apache-2.0
"""The reference block storage service: volumes, snapshots and backups that are real files, done by a cluster of services."""
