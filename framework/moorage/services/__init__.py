# SPDX-License-Identifier: Apache-2.0
"""Services: who is alive."""
