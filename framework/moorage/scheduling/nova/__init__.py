# SPDX-License-Identifier: Apache-2.0
"""Filter and weigher classes that were written for Nova, run as they are."""
