# SPDX-License-Identifier: Apache-2.0
"""The fleet: what machines there are."""
