# SPDX-License-Identifier: Apache-2.0
"""Observers: plugins that are told what the control plane does."""
