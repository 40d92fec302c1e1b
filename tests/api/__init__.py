# SPDX-License-Identifier: Apache-2.0
"""The API over real sockets."""
