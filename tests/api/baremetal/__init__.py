# SPDX-License-Identifier: Apache-2.0
"""The bare metal dialect over HTTP."""
