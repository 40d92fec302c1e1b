# SPDX-License-Identifier: Apache-2.0
"""The journal: numbers recorded events, reads them and serves them."""
