# SPDX-License-Identifier: Apache-2.0
"""The reference strategies: which node belongs to which shard."""
