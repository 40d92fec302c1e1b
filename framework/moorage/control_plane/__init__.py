# SPDX-License-Identifier: Apache-2.0
"""The roles, their supervisor and the wiring: the only place that joins the families."""
