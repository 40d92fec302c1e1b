# SPDX-License-Identifier: Apache-2.0
"""The reference compute service: small, but its operations are real."""
