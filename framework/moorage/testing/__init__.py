# SPDX-License-Identifier: Apache-2.0
"""Conformance kits: tests that a plugin of each family must pass, to be mixed into its author's own test classes."""
