# SPDX-License-Identifier: Apache-2.0
"""The volume dialect over HTTP."""
