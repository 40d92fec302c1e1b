# SPDX-License-Identifier: Apache-2.0
"""The reference plugins, written only against the public interfaces of moorage."""
