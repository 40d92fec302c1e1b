# SPDX-License-Identifier: Apache-2.0
"""Observers: plugins that get the events of the control plane."""
